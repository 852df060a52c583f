/* What torch asks of NVML, which it opens by name: for the message where memory runs out, and for links between GPUs.
 *
 *   DESK_NVML=refuse  as on MIG slices, virtual GPUs, WSL and Jetson, which do not tell a device's processes */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit_v2(void) {
    return SUCCESS;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *name, void **device) {
    *device = (void *)0x10;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
    const char *wish = getenv("DESK_NVML");
    *count = 0;
    return wish && strcmp(wish, "refuse") == 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void) {
    return NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) {
    return NOT_SUPPORTED;
}

/* What the caller has cleared says that there is no fabric. */
int nvmlDeviceGetGpuFabricInfoV(void) {
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}
