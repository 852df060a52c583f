/* A CUDA runtime without a device: kernels are counted and not run, everything is finished at once. What torch asks for
 * and is neither here nor in memory.c is generated: it returns 0, which is cudaSuccess. Counters are for ctypes. */
#include "desk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MULTIPROCESSORS 132

unsigned long long desk_launches;
unsigned long long desk_small_launches; /* of fewer blocks than the device has multiprocessors */
unsigned long long desk_synchronisations;

static int device = 0;

uint64_t desk_setting(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

uint64_t desk_total(void) {
    return desk_setting("DESK_GPU_MIB", 144384) * MIB;
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = desk_setting("DESK_GPUS", 1);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *found) {
    *found = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int chosen) {
    if (chosen >= (int)desk_setting("DESK_GPUS", 1)) {
        return cudaErrorInvalidDevice;
    }
    device = chosen;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int of) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "no GPU, a stub of one");
    properties->totalGlobalMem = desk_total();
    properties->major = 9;
    properties->minor = 0;
    properties->multiProcessorCount = MULTIPROCESSORS;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxThreadsDim[0] = 1024;
    properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = 65535;
    properties->maxGridSize[2] = 65535;
    properties->regsPerBlock = 65536;
    properties->regsPerMultiprocessor = 65536;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = 232448;
    properties->sharedMemPerMultiprocessor = 233472;
    properties->totalConstMem = 65536;
    properties->textureAlignment = 512;
    properties->l2CacheSize = 50 * MIB;
    properties->memoryBusWidth = 6144;
    properties->concurrentKernels = 1;
    properties->unifiedAddressing = 1;
    properties->asyncEngineCount = 3;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int of) {
    static const struct {
        enum cudaDeviceAttr attribute;
        int value;
    } known[] = {
        {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrMultiProcessorCount, MULTIPROCESSORS},
        {cudaDevAttrMaxThreadsPerBlock, 1024},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
        {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrMaxGridDimX, 2147483647},
        {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535},
        {cudaDevAttrMaxBlockDimX, 1024},
        {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64},
        {cudaDevAttrMaxRegistersPerBlock, 65536},
    };
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].attribute == attribute) {
            *value = known[i].value;
        }
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *name, int size, int of) {
    snprintf(name, size, "0000:%02d:00.0", of);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int from, int to) {
    *can = 0;
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorInvalidDevice ? "cudaErrorInvalidDevice" : "an error of the stub";
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        default:
            return "an error of the stub";
    }
}

/* Streams and events: everything is finished at once, unless DESK_HANG asks otherwise. */

static uint64_t last_handle = 0x1000;

static void *new_handle(void) {
    last_handle += 16;
    return (void *)last_handle;
}

static int hangs(void) {
    const char *file = getenv("DESK_HANG");
    const char *rank = getenv("LOCAL_RANK");
    return file && rank && strcmp(rank, "0") == 0 && access(file, F_OK) == 0;
}

cudaError_t desk_wait(void) {
    desk_synchronisations++;
    while (hangs()) {
        usleep(1000);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    return desk_wait();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return desk_wait();
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return desk_wait();
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return hangs() ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return hangs() ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    *event = new_handle();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = new_handle();
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = 1;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    *stream = new_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    *stream = new_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    *stream = new_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) {
        *least = 0;
    }
    if (greatest) {
        *greatest = -5;
    }
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
#endif

/* Kernels: launched, counted, not run */

static __thread dim3 asked_grid; /* between the two halves of <<<...>>> */
static __thread dim3 asked_block;
static __thread size_t asked_shared;
static __thread void *asked_stream;

static cudaError_t launch(dim3 grid) {
    desk_launches++;
    if ((uint64_t)grid.x * grid.y * grid.z < MULTIPROCESSORS) {
        desk_small_launches++;
    }
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch(grid);
}

cudaError_t __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch(grid);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch(grid);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    return launch(config->gridDim);
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    asked_grid = grid;
    asked_block = block;
    asked_shared = shared;
    asked_stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = asked_grid;
    *block = asked_block;
    *shared = asked_shared;
    *(void **)stream = asked_stream;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->maxDynamicSharedSizeBytes = 49152;
    attributes->numRegs = 32;
    attributes->ptxVersion = 90;
    attributes->binaryVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    *address = (void *)(END_OF_ADDRESSES + 4096);
    return cudaSuccess;
}
