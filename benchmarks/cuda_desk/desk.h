/* What the files of the stub runtime share, and what the environment says of the device:
 *
 *   DESK_GPUS       how many there are (1)
 *   DESK_GPU_MIB    memory of each, as torch is told (144384, that of an H200)
 *   DESK_GIVES_MIB  what can be had of it (all): less, as where something else fills the device; more, to go on
 *   DESK_HANG       a file: while it exists, rank 0's device does not finish what it was given */
#include <cuda_runtime_api.h>
#include <stdint.h>

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define FIRST_ADDRESS 0x700000000000ULL /* of the device */
#define END_OF_ADDRESSES 0x780000000000ULL

uint64_t desk_setting(const char *name, uint64_t otherwise);
uint64_t desk_total(void); /* bytes of the device */
cudaError_t desk_wait(void); /* for all that the device was given */
