/* A backend on host memory over one with memory of its own: operands go there for each call and results come
 * back, so that the tests of the CPU backend serve any other. Buffers on the device have exactly the size
 * that the operation may touch and the alignment that the host's have. */
#ifndef QC_TEST_DEVICE_ENV_H
#define QC_TEST_DEVICE_ENV_H

#include "backend.h"

/* The device that QC_TEST_DEVICE names ("emulated", "cuda"), wrapped; exits the program with 77 and the
 * reason if there is none. close ends both. */
qc_backend *device_env_new(qc_pool *pool, qc_compute compute);

#endif
