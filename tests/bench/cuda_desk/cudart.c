/* A CUDA runtime without a device: device memory is a range of addresses, kernels do nothing, copies to the host give
 * zeros. What is not here and torch asks for is generated: it returns 0, which is cudaSuccess.
 *
 * The environment says what the device is like:
 *   DESK_GPUS       how many there are (1)
 *   DESK_GPU_MIB    memory of each, as torch is told (144384, that of an H200)
 *   DESK_GIVES_MIB  what can be had of it (all): less, as where something else fills the device; more, to go on
 *   DESK_HANG       a file: while it exists, rank 0's device does not finish what it was given
 * Counters are for ctypes; they count from the start of the process. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)
#define FIRST_ADDRESS 0x700000000000ULL
#define END_OF_ADDRESSES 0x780000000000ULL
#define MULTIPROCESSORS 132
#define LIST 8192 /* segments and pinned buffers at a time */

unsigned long long desk_launches;
unsigned long long desk_small_launches; /* of fewer blocks than the device has multiprocessors */
unsigned long long desk_synchronisations;
unsigned long long desk_copies; /* of any direction, and memsets */

static int device = 0;

/* Memory */

struct Range {
    uint64_t start;
    uint64_t size;
};

static struct Range segments[LIST];
static struct Range pinned[LIST];
static uint64_t next_address = FIRST_ADDRESS;
static uint64_t used = 0;

static uint64_t from_environment(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static uint64_t total(void) {
    return from_environment("DESK_GPU_MIB", 144384) * MIB;
}

static int is_full(uint64_t more) {
    uint64_t limit = from_environment("DESK_GIVES_MIB", total() / MIB) * MIB;
    return used + more > limit;
}

static uint64_t rounded(uint64_t size, uint64_t unit) {
    return (size + unit - 1) / unit * unit;
}

static void add(struct Range *list, uint64_t start, uint64_t size) {
    for (int i = 0; i < LIST; i++) {
        if (list[i].size == 0) {
            list[i].start = start;
            list[i].size = size;
            return;
        }
    }
    fprintf(stderr, "cudart.c: more than %d ranges of memory\n", LIST);
    abort();
}

/* Bytes of the range that starts here, which is then no longer in the list. */
static uint64_t taken_out(struct Range *list, uint64_t start) {
    for (int i = 0; i < LIST; i++) {
        if (list[i].size != 0 && list[i].start == start) {
            uint64_t size = list[i].size;
            list[i].size = 0;
            return size;
        }
    }
    return 0;
}

static int is_on_device(const void *address) {
    return (uint64_t)address >= FIRST_ADDRESS && (uint64_t)address < END_OF_ADDRESSES;
}

static int is_pinned(const void *address) {
    for (int i = 0; i < LIST; i++) {
        uint64_t offset = (uint64_t)address - pinned[i].start;
        if (pinned[i].size != 0 && offset < pinned[i].size) {
            return 1;
        }
    }
    return 0;
}

cudaError_t cudaMalloc(void **address, size_t size) {
    if (is_full(size)) {
        return cudaErrorMemoryAllocation;
    }
    *address = (void *)next_address;
    add(segments, next_address, size);
    next_address += rounded(size, 2 * MIB);
    used += size;
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) {
    return cudaMalloc(address, size);
}

cudaError_t cudaFree(void *address) {
    used -= taken_out(segments, (uint64_t)address);
    return cudaSuccess;
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    return cudaFree(address);
}

cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
    if (posix_memalign(address, 4096, size ? size : 1) != 0) {
        return cudaErrorMemoryAllocation;
    }
    add(pinned, (uint64_t)*address, size ? size : 1);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address) {
    taken_out(pinned, (uint64_t)address);
    free(address);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *total_bytes = total();
    *free_bytes = used < total() ? total() - used : 0;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    if (is_on_device(address)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)address;
        attributes->device = device;
    } else if (is_pinned(address)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = (void *)address;
    }
    return cudaSuccess;
}

/* What the caching allocator asks of the driver for expandable segments: addresses are reserved, then backed. */

static CUresult reserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags) {
    *address = next_address;
    next_address += rounded(size, GIB);
    return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *wish,
                       unsigned long long flags) {
    if (is_full(size)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    used += size;
    *handle = size; /* all that has to be known of it later */
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    used -= handle;
    return CUDA_SUCCESS;
}

static CUresult granularity(size_t *size, const CUmemAllocationProp *wish, CUmemAllocationGranularity_flags flags) {
    *size = 2 * MIB;
    return CUDA_SUCCESS;
}

static CUresult driver_attribute(int *value, CUdevice_attribute attribute, CUdevice of) {
    *value = 0;
    return CUDA_SUCCESS;
}

static CUresult driver_device(CUdevice *found, int ordinal) {
    *found = ordinal;
    return CUDA_SUCCESS;
}

static CUresult succeed(void) {
    return CUDA_SUCCESS;
}

static const struct {
    const char *name;
    void *function;
} driver[] = {
    {"cuMemAddressReserve", (void *)reserve},
    {"cuMemCreate", (void *)create},
    {"cuMemRelease", (void *)release},
    {"cuMemGetAllocationGranularity", (void *)granularity},
    {"cuDeviceGetAttribute", (void *)driver_attribute},
    {"cuDeviceGet", (void *)driver_device},
};

static cudaError_t entry_point(const char *name, void **function, enum cudaDriverEntryPointQueryResult *status) {
    *function = (void *)succeed;
    for (size_t i = 0; i < sizeof driver / sizeof *driver; i++) {
        if (strcmp(driver[i].name, name) == 0) {
            *function = driver[i].function;
        }
    }
    if (status) {
        *status = cudaDriverEntryPointSuccess;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    return entry_point(name, function, status);
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = from_environment("DESK_GPUS", 1);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *found) {
    *found = device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int chosen) {
    if (chosen >= (int)from_environment("DESK_GPUS", 1)) {
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
    properties->totalGlobalMem = total();
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

static cudaError_t wait_for_all(void) {
    desk_synchronisations++;
    while (hangs()) {
        usleep(1000);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    return wait_for_all();
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return wait_for_all();
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return wait_for_all();
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
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
#endif

/* Copies */

static cudaError_t copy(void *to, const void *from, size_t size) {
    desk_copies++;
    if (is_on_device(to)) {
        return cudaSuccess;
    }
    if (is_on_device(from)) {
        memset(to, 0, size);
    } else {
        memcpy(to, from, size);
    }
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    wait_for_all();
    return copy(to, from, size);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, size);
}

cudaError_t cudaMemset(void *address, int value, size_t size) {
    desk_copies++;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    desk_copies++;
    return cudaSuccess;
}

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
