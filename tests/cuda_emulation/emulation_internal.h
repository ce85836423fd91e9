/* What the parts of the emulator share: buffers, launches, faults on demand. */
#ifndef QC_CUDA_EMULATION_INTERNAL_H
#define QC_CUDA_EMULATION_INTERNAL_H

#include "emulation.h"

namespace emulation
{

/* Results of the driver's and cuBLAS's calls that the emulator gives. */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NO_BINARY_FOR_GPU = 209,
    NOT_FOUND = 500,
    ILLEGAL_ADDRESS = 700,
    MISALIGNED_ADDRESS = 716,
    BLAS_EXECUTION_FAILED = 13
};

/* What a call returns before it does anything: the error that broke the device earlier, or the one that
 * configure() asked for; else SUCCESS. */
int begin_call(const char *name);
/* Breaks the device: every later call fails with `code`. */
void break_device(int code);

/* A device address of n bytes, NULL when the device's memory is used up. */
void *buffer_new(size_t n_bytes);
bool buffer_free(void *address);
size_t buffers_left();
size_t bytes_free(size_t *ret_total);
/* Real memory of n bytes at a device address; NULL after printing why, with the name of the call. */
void *buffer_range(const char *call, const void *address, size_t n_bytes);
bool is_device_address(const void *p);

/* Whether accesses to shared memory are checked for their order, which takes most of the time. */
extern bool check_order;

/* Runs all blocks; false if there was a fault. */
bool launch(const kernel *k, dim3 grid, dim3 block, size_t shared_bytes, const void *args);
const kernel *find_kernel(const char *name);

} /* namespace emulation */

#endif
