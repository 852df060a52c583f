/* The memory of a device that is not there: addresses, which nothing backs. Copies to the host give zeros. */
#include "desk.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIST 8192 /* segments and pinned buffers at a time */

unsigned long long desk_copies; /* of any direction, and memsets */

struct Range {
    uint64_t start;
    uint64_t size;
};

static struct Range segments[LIST];
static struct Range pinned[LIST];
static uint64_t next_address = FIRST_ADDRESS;
static uint64_t used = 0;

static int is_full(uint64_t more) {
    uint64_t limit = desk_setting("DESK_GIVES_MIB", desk_total() / MIB) * MIB;
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
    fprintf(stderr, "memory.c: more than %d ranges of memory\n", LIST);
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
    *total_bytes = desk_total();
    *free_bytes = used < desk_total() ? desk_total() - used : 0;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    if (is_on_device(address)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)address;
        cudaGetDevice(&attributes->device);
    } else if (is_pinned(address)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->hostPointer = (void *)address;
    }
    return cudaSuccess;
}

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
    desk_wait();
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

#if CUDART_VERSION >= 13000
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status) {
    return entry_point(name, function, status);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status) {
    return entry_point(name, function, status);
}
#endif
