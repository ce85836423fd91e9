/* The functions of the CUDA driver and of cuBLAS that the backend calls, found at run time: one binary works
 * on machines with and without a device, and no toolkit is needed to build its host side. Names and types
 * are those of the toolkit's cuda.h and cublas_v2.h (12 and 13; test cuda_api compares where they are). */
#ifndef QC_CUDA_API_H
#define QC_CUDA_API_H

#include "qc_err.h"

#include <stddef.h>

typedef struct CUctx_st *qc_cu_context;
typedef struct CUstream_st *qc_cu_stream;
typedef struct CUevent_st *qc_cu_event;
typedef struct CUmod_st *qc_cu_module;
typedef struct CUfunc_st *qc_cu_function;
typedef struct cublasContext *qc_cublas;
typedef unsigned long long qc_cu_address;

enum { /* CUresult, cublasStatus_t */
       QC_CU_OK = 0,
       QC_CU_OUT_OF_MEMORY = 2,
       QC_CU_NO_DEVICE = 100,
       QC_CU_NO_BINARY = 209,
       QC_CU_UNSUPPORTED_PTX = 222,
       QC_CUBLAS_ALLOC_FAILED = 3
};
enum { /* CUdevice_attribute, CUfunction_attribute, flags */
       QC_CU_CLOCK_KHZ = 13,
       QC_CU_MULTIPROCESSORS = 16,
       QC_CU_CAPABILITY_MAJOR = 75,
       QC_CU_CAPABILITY_MINOR = 76,
       QC_CU_SHARED_BYTES = 8,
       QC_CU_STREAM_NON_BLOCKING = 1,
       QC_CU_EVENT_NO_TIMING = 2
};
enum { /* cublasOperation_t, cublasFillMode_t, cudaDataType_t, cublasComputeType_t ... */
       QC_CUBLAS_N = 0,
       QC_CUBLAS_T = 1,
       QC_CUBLAS_UPPER = 1,
       QC_CUBLAS_LEFT = 0,
       QC_CUBLAS_UNIT = 1,
       QC_CUDA_R_32F = 0,
       QC_CUDA_R_16BF = 14,
       QC_CUBLAS_COMPUTE_32F = 68,
       QC_CUBLAS_GEMM_DEFAULT = -1
};

/* name, arguments */
#define QC_CUDA_DRIVER_CALLS(X)                                                                              \
    X(cuInit, (unsigned))                                                                                    \
    X(cuDriverGetVersion, (int *))                                                                           \
    X(cuGetErrorName, (unsigned, const char **))                                                             \
    X(cuDeviceGetCount, (int *))                                                                             \
    X(cuDeviceGet, (int *, int))                                                                             \
    X(cuDeviceGetName, (char *, int, int))                                                                   \
    X(cuDeviceGetAttribute, (int *, unsigned, int))                                                          \
    X(cuDevicePrimaryCtxRetain, (qc_cu_context *, int))                                                      \
    X(cuDevicePrimaryCtxRelease_v2, (int))                                                                   \
    X(cuCtxSetCurrent, (qc_cu_context))                                                                      \
    X(cuModuleLoadData, (qc_cu_module *, const void *))                                                      \
    X(cuModuleUnload, (qc_cu_module))                                                                        \
    X(cuModuleGetFunction, (qc_cu_function *, qc_cu_module, const char *))                                   \
    X(cuFuncSetAttribute, (qc_cu_function, unsigned, int))                                                   \
    X(cuLaunchKernel, (qc_cu_function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                       qc_cu_stream, void **, void **))                                                      \
    X(cuMemAllocAsync, (qc_cu_address *, size_t, qc_cu_stream))                                              \
    X(cuMemFreeAsync, (qc_cu_address, qc_cu_stream))                                                         \
    X(cuMemGetInfo_v2, (size_t *, size_t *))                                                                 \
    X(cuMemAllocHost_v2, (void **, size_t))                                                                  \
    X(cuMemFreeHost, (void *))                                                                               \
    X(cuMemcpyHtoDAsync_v2, (qc_cu_address, const void *, size_t, qc_cu_stream))                             \
    X(cuMemcpyDtoHAsync_v2, (void *, qc_cu_address, size_t, qc_cu_stream))                                   \
    X(cuMemsetD32Async, (qc_cu_address, unsigned, size_t, qc_cu_stream))                                     \
    X(cuStreamCreate, (qc_cu_stream *, unsigned))                                                            \
    X(cuStreamDestroy_v2, (qc_cu_stream))                                                                    \
    X(cuStreamSynchronize, (qc_cu_stream))                                                                   \
    X(cuStreamWaitEvent, (qc_cu_stream, qc_cu_event, unsigned))                                              \
    X(cuEventCreate, (qc_cu_event *, unsigned))                                                              \
    X(cuEventDestroy_v2, (qc_cu_event))                                                                      \
    X(cuEventRecord, (qc_cu_event, qc_cu_stream))                                                            \
    X(cuEventSynchronize, (qc_cu_event))
#define QC_CUBLAS_CALLS(X)                                                                                   \
    X(cublasCreate_v2, (qc_cublas *))                                                                        \
    X(cublasDestroy_v2, (qc_cublas))                                                                         \
    X(cublasSetStream_v2, (qc_cublas, qc_cu_stream))                                                         \
    X(cublasGemmEx, (qc_cublas, unsigned, unsigned, int, int, int, const void *, const void *, unsigned,     \
                     int, const void *, unsigned, int, const void *, void *, unsigned, int, unsigned, int))  \
    X(cublasSsyrk_v2, (qc_cublas, unsigned, unsigned, int, int, const float *, const float *, int,           \
                       const float *, float *, int))                                                         \
    X(cublasStrsm_v2, (qc_cublas, unsigned, unsigned, unsigned, unsigned, int, int, const float *,           \
                       const float *, int, float *, int))

typedef struct qc_cuda_api {
    void *driver, *cublas; /* of dlopen; the same for an emulator */
#define QC_CUDA_MEMBER(name, args) unsigned(*name) args;
    QC_CUDA_DRIVER_CALLS(QC_CUDA_MEMBER)
    QC_CUBLAS_CALLS(QC_CUDA_MEMBER)
#undef QC_CUDA_MEMBER
} qc_cuda_api;

/* Open the libraries, or the emulator of that name instead of both. QC_E_UNSUPPORTED: they are not there, or
 * too old. Close with qc_cuda_api_close in any case. */
int qc_cuda_api_open(qc_cuda_api *api, const char *emulator, qc_err *err) QC_WARN_UNUSED;
/* Close what is open. */
void qc_cuda_api_close(qc_cuda_api *api);

#endif
