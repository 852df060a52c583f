/* The driver's library, which torch loads for kernels that it compiles itself: there are none here. */

int cuInit(unsigned flags) {
    return 0;
}

int cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = "an error of the stub";
    return 0;
}
