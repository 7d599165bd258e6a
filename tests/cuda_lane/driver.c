// A CUDA driver without a device. Each process that starts it adds a line to $DRIVER_LOG: its number and its parent's.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long flags;

static int is_started;

static int no_device(void) { return 100; }  // CUDA_ERROR_NO_DEVICE

int cuInit(unsigned ignored) {
  is_started = 1;
  FILE *log = fopen(getenv("DRIVER_LOG"), "a");
  if (log) {
    fprintf(log, "%d %d\n", getpid(), getppid());
    fclose(log);
  }
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = 0;
  return is_started ? 0 : 3;  // CUDA_ERROR_NOT_INITIALIZED
}

int cuDriverGetVersion(int *version) {
  *version = 99000;
  return 0;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, flags wanted, int *status) {
  *found = !strcmp(name, "cuInit")               ? (void *)cuInit
           : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
           : !strcmp(name, "cuGetProcAddress")   ? (void *)cuGetProcAddress_v2
                                                 : (void *)no_device;
  if (status) *status = 0;
  return 0;
}

int cuGetProcAddress(const char *name, void **found, int version, flags wanted) {
  return cuGetProcAddress_v2(name, found, version, wanted, 0);
}

// The management library, which torch asks first how many devices there are.
int nvmlInit(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = 1;
  return 0;
}
