/* cuDNN that plans every convolution with one engine and computes nothing.
 *
 *   DESK_CUDNN      the version that torch is told (92400); the desk gives the one that torch is installed with
 *   DESK_WORKSPACE  bytes that each plan asks for (0) */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_BEHAVIOUR_NOTE = 19 }; /* of cudnnBackendAttributeType_t */
enum { WORKSPACE_SIZE = 402, INTERMEDIATE_UIDS = 403 };                   /* of a plan, cudnnBackendAttributeName_t */

unsigned long long desk_convolutions;
unsigned long long desk_normalisations;

static long long from_environment(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text ? atoll(text) : otherwise;
}

size_t cudnnGetVersion(void) {
    return from_environment("DESK_CUDNN", 92400);
}

size_t cudnnGetCudartVersion(void) {
    return 13000;
}

int cudnnGetProperty(int property, int *value) {
    int version = from_environment("DESK_CUDNN", 92400);
    int parts[] = {version / 10000, version / 100 % 100, version % 100};
    *value = parts[property];
    return 0;
}

const char *cudnnGetErrorString(int error) {
    return "an error of the stub";
}

void cudnnGetLastErrorString(char *message, size_t size) {
    if (size != 0) {
        *message = 0;
    }
}

int cudnnCreate(void **handle) {
    *handle = malloc(64);
    return 0;
}

int cudnnBackendCreateDescriptor(int type, void **descriptor) {
    *descriptor = calloc(1, 64);
    return 0;
}

int cudnnBackendDestroyDescriptor(void *descriptor) {
    free(descriptor);
    return 0;
}

int cudnnBackendExecute(void *handle, void *plan, void *variants) {
    desk_convolutions++;
    return 0;
}

int cudnnBatchNormalizationForwardTrainingEx(void) {
    desk_normalisations++;
    return 0;
}

int cudnnBatchNormalizationBackwardEx(void) {
    desk_normalisations++;
    return 0;
}

/* One engine, without knobs, notes and behaviours; numbers are 0. */
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count, void *values) {
    int64_t elements = room > 0 ? room : 1;
    int is_empty = type == TYPE_BEHAVIOUR_NOTE || name == WORKSPACE_SIZE || name == INTERMEDIATE_UIDS;
    if (count) {
        *count = is_empty ? 0 : elements;
        if (type == TYPE_DESCRIPTOR) {
            *count = 1;
        }
    }
    if (!values || type == TYPE_DESCRIPTOR) {
        return 0;
    }
    memset(values, 0, elements * (type == TYPE_INT64 ? sizeof(int64_t) : sizeof(int)));
    if (name == WORKSPACE_SIZE) {
        *(int64_t *)values = from_environment("DESK_WORKSPACE", 0);
    }
    return 0;
}

/* cuDNN's own batch normalisation asks for nothing. */

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle, int mode, int operation, void *x, void *z,
                                                             void *y, void *scale, void *activation, size_t *size) {
    *size = 0;
    return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle, int mode, int operation, void *x, void *y, void *dy,
                                                      void *dz, void *dx, void *scale, void *activation, size_t *size) {
    *size = 0;
    return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle, int mode, int operation, void *activation,
                                                         void *x, size_t *size) {
    *size = 0;
    return 0;
}
