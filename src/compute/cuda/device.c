/* Opening and closing of a device, memory, launches. */
#include "device.h"

#include "qc_alloc.h"
#include "qc_math.h"

#include <stdio.h>
#include <string.h>

/* ---- the kernels as nvcc made them ---- */

#if QC_CUDA_IMAGES
#define DECLARE_IMAGE(module) extern const char qc_cuda_image_##module[];
QC_CUDA_MODULES(DECLARE_IMAGE)
#define IMAGE(module) qc_cuda_image_##module,
#else
#define IMAGE(module) NULL,
#endif
static const char *const images[QC_CUDA_N_MODULES] = {QC_CUDA_MODULES(IMAGE)};

static const struct {
    const char *name;
    qc_cuda_module module;
} kernels[QC_CUDA_N_KERNELS] = {
#define KERNEL(name, module, args) {"qc_cuda_" #name, QC_CUDA_M_##module},
    QC_CUDA_KERNELS(KERNEL)
#undef KERNEL
};

bool qc_backend_cuda_built(void)
{
    return images[0] != NULL;
}

/* ---- failures ---- */

int qc_cuda_check(const qc_cuda_backend *cb, unsigned result, const char *call, qc_err *err)
{
    const char *name = NULL;
    if (result == QC_CU_OK)
        return QC_OK;
    cb->api.cuGetErrorName(result, &name);
    if (result == QC_CU_OUT_OF_MEMORY)
        return qc_fail(err, QC_E_RESOURCE, "%s: out of device memory (%s; %llu MB in use)", cb->name, call,
                       (unsigned long long)(cb->bytes_used / 1000000));
    if (result == QC_CU_NO_BINARY || result == QC_CU_UNSUPPORTED_PTX)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "%s: the kernels were not built for this device (compute capability %d.%d, %s)",
                       cb->name, cb->info.capability / 10, cb->info.capability % 10, name ? name : call);
    return qc_fail(err, QC_E_RESOURCE, "%s: the device is lost: %s gives %s (%u)", cb->name, call,
                   name ? name : "an error", result);
}

int qc_cuda_check_blas(const qc_cuda_backend *cb, unsigned status, const char *call, qc_err *err)
{
    if (status == QC_CU_OK)
        return QC_OK;
    if (status == QC_CUBLAS_ALLOC_FAILED)
        return qc_fail(err, QC_E_RESOURCE, "%s: out of device memory (%s)", cb->name, call);
    return qc_fail(err, QC_E_RESOURCE, "%s: the device is lost: %s gives status %u", cb->name, call, status);
}

int qc_cuda_check_size(int64_t n, qc_err *err)
{
    if (n >= 0 && n <= INT32_MAX)
        return QC_OK;
    return qc_fail(err, QC_E_UNSUPPORTED, "a matrix with a side or stride of %lld elements on a device",
                   (long long)n);
}

/* ---- memory ---- */

static int note_block(qc_cuda_backend *cb, void *address, size_t n_bytes, qc_err *err)
{
    if (cb->n_blocks == cb->cap_blocks) {
        size_t cap = cb->cap_blocks ? 2 * cb->cap_blocks : 64;
        qc_cuda_block *blocks = qc_realloc(cb->blocks, cb->cap_blocks * sizeof *blocks, cap * sizeof *blocks);
        if (!blocks)
            return qc_fail_nomem(err, "list of device buffers", cap * sizeof *blocks);
        cb->blocks = blocks;
        cb->cap_blocks = cap;
    }
    cb->blocks[cb->n_blocks++] = (qc_cuda_block){address, n_bytes};
    cb->bytes_used += n_bytes;
    if (cb->bytes_used > cb->bytes_peak)
        cb->bytes_peak = cb->bytes_used;
    return QC_OK;
}

int qc_cuda_alloc(qc_cuda_backend *cb, size_t n_bytes, qc_cu_stream stream, void **ret, qc_err *err)
{
    qc_cu_address address = 0;
    n_bytes = n_bytes > 0 ? n_bytes : sizeof(float);
    QC_TRY(qc_cuda_check(cb, cb->api.cuMemAllocAsync(&address, n_bytes, stream), "cuMemAllocAsync", err));
    void *p = (void *)(uintptr_t)address;
    int rc = note_block(cb, p, n_bytes, err);
    if (rc == QC_OK)
        *ret = p;
    else
        cb->api.cuMemFreeAsync(address, stream);
    return rc;
}

void qc_cuda_free(qc_cuda_backend *cb, void *address)
{
    if (!address)
        return;
    for (size_t i = cb->n_blocks; i-- > 0;)
        if (cb->blocks[i].address == address) {
            cb->bytes_used -= cb->blocks[i].n_bytes;
            cb->blocks[i] = cb->blocks[--cb->n_blocks];
            break;
        }
    cb->api.cuMemFreeAsync((uintptr_t)address, cb->stream);
}

void *qc_cuda_scratch(qc_cuda_backend *cb, qc_cuda_scratch_id id, size_t n_bytes, qc_err *err)
{
    qc_cuda_block *s = &cb->scratch[id];
    if (s->address && s->n_bytes >= n_bytes)
        return s->address;
    qc_cuda_free(cb, s->address);
    *s = (qc_cuda_block){0};
    if (qc_cuda_alloc(cb, n_bytes, cb->stream, &s->address, err) == QC_OK)
        s->n_bytes = n_bytes;
    return s->address;
}

int qc_cuda_to_device(qc_cuda_backend *cb, void *dst, const void *host, size_t n_bytes, qc_err *err)
{
    if (n_bytes == 0)
        return QC_OK;
    return qc_cuda_check(cb, cb->api.cuMemcpyHtoDAsync_v2((uintptr_t)dst, host, n_bytes, cb->stream),
                         "cuMemcpyHtoDAsync", err);
}

int qc_cuda_to_host(qc_cuda_backend *cb, void *host, const void *src, size_t n_bytes, qc_err *err)
{
    if (n_bytes > 0)
        QC_TRY(qc_cuda_check(cb, cb->api.cuMemcpyDtoHAsync_v2(host, (uintptr_t)src, n_bytes, cb->stream),
                             "cuMemcpyDtoHAsync", err));
    return qc_cuda_check(cb, cb->api.cuStreamSynchronize(cb->stream), "cuStreamSynchronize", err);
}

static float *cuda_alloc(qc_backend *be, int64_t n_elems, qc_err *err)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    void *p = NULL;
    if (n_elems < 0 || n_elems > INT64_MAX / 8) {
        qc_fail_nomem(err, "device buffer", (unsigned long long)n_elems * sizeof(float));
        return NULL;
    }
    (void)qc_cuda_alloc(cb, (size_t)n_elems * sizeof(float), cb->stream, &p, err);
    return p;
}

static void cuda_free(qc_backend *be, float *buffer)
{
    qc_cuda_free((qc_cuda_backend *)be, buffer);
}

static int cuda_upload(qc_backend *be, float *dst, const float *host, int64_t n_elems, qc_err *err)
{
    return qc_cuda_to_device((qc_cuda_backend *)be, dst, host, (size_t)n_elems * sizeof *dst, err);
}

static int cuda_download(qc_backend *be, float *host, const float *src, int64_t n_elems, qc_err *err)
{
    return qc_cuda_to_host((qc_cuda_backend *)be, host, src, (size_t)n_elems * sizeof *src, err);
}

/* ---- launches ---- */

int qc_cuda_launch(qc_cuda_backend *cb, qc_cuda_kernel kernel, int64_t grid_x, int64_t grid_y, int threads,
                   int64_t shared_bytes, const void *args, qc_err *err)
{
    enum { MAX_GRID_X = INT32_MAX, MAX_GRID_Y = 65535, STATIC_LIMIT = 48 << 10 };
    void *params[] = {(void *)(uintptr_t)args};
    qc_cu_function function = cb->functions[kernel];
    if (grid_x <= 0 || grid_y <= 0)
        return QC_OK;
    if (grid_x > MAX_GRID_X || grid_y > MAX_GRID_Y)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: %s on a grid of %lld x %lld blocks", cb->name,
                       kernels[kernel].name, (long long)grid_x, (long long)grid_y);
    if (shared_bytes > STATIC_LIMIT)
        QC_TRY(qc_cuda_check(cb, cb->api.cuFuncSetAttribute(function, QC_CU_SHARED_BYTES, (int)shared_bytes),
                             kernels[kernel].name, err));
    return qc_cuda_check(cb,
                         cb->api.cuLaunchKernel(function, (unsigned)grid_x, (unsigned)grid_y, 1,
                                                (unsigned)threads, 1, 1, (unsigned)shared_bytes, cb->stream,
                                                params, NULL),
                         kernels[kernel].name, err);
}

/* ---- opening ---- */

static int choose_device(qc_cuda_backend *cb, int index, qc_err *err)
{
    int count = 0, major = 0, minor = 0, khz = 0;
    unsigned result = cb->api.cuInit(0);
    if (result == QC_CU_NO_DEVICE)
        return qc_fail(err, QC_E_UNSUPPORTED, "no CUDA device on this machine");
    QC_TRY(qc_cuda_check(cb, result, "cuInit", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuDeviceGetCount(&count), "cuDeviceGetCount", err));
    if (index >= count)
        return qc_fail(err, QC_E_UNSUPPORTED, "no CUDA device %d on this machine, which has %d", index,
                       count);
    QC_TRY(qc_cuda_check(cb, cb->api.cuDeviceGet(&cb->device, index), "cuDeviceGet", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuDeviceGetName(cb->info.name, sizeof cb->info.name, cb->device),
                         "cuDeviceGetName", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuDeviceGetAttribute(&major, QC_CU_CAPABILITY_MAJOR, cb->device),
                         "cuDeviceGetAttribute", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuDeviceGetAttribute(&minor, QC_CU_CAPABILITY_MINOR, cb->device),
                         "cuDeviceGetAttribute", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuDeviceGetAttribute(&khz, QC_CU_CLOCK_KHZ, cb->device),
                         "cuDeviceGetAttribute", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuDriverGetVersion(&cb->info.driver), "cuDriverGetVersion", err));
    cb->info.capability = 10 * major + minor;
    cb->info.clock_mhz = khz / 1000;
    return QC_OK;
}

static int load_kernels(qc_cuda_backend *cb, qc_err *err)
{
    for (int i = 0; i < QC_CUDA_N_MODULES; i++)
        QC_TRY(
            qc_cuda_check(cb, cb->api.cuModuleLoadData(&cb->modules[i], images[i]), "cuModuleLoadData", err));
    for (int i = 0; i < QC_CUDA_N_KERNELS; i++)
        QC_TRY(qc_cuda_check(
            cb,
            cb->api.cuModuleGetFunction(&cb->functions[i], cb->modules[kernels[i].module], kernels[i].name),
            kernels[i].name, err));
    return QC_OK;
}

static int open_device(qc_cuda_backend *cb, int index, qc_err *err)
{
    size_t left = 0, total = 0;
    QC_TRY(choose_device(cb, index, err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuDevicePrimaryCtxRetain(&cb->context, cb->device),
                         "cuDevicePrimaryCtxRetain", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuCtxSetCurrent(cb->context), "cuCtxSetCurrent", err));
    QC_TRY(load_kernels(cb, err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuStreamCreate(&cb->stream, QC_CU_STREAM_NON_BLOCKING), "cuStreamCreate",
                         err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuStreamCreate(&cb->copies, QC_CU_STREAM_NON_BLOCKING), "cuStreamCreate",
                         err));
    for (int i = 0; i < 2; i++)
        QC_TRY(qc_cuda_check(cb, cb->api.cuEventCreate(&cb->staged[i], QC_CU_EVENT_NO_TIMING),
                             "cuEventCreate", err));
    QC_TRY(qc_cuda_check(cb, cb->api.cuMemGetInfo_v2(&left, &total), "cuMemGetInfo", err));
    cb->info.memory_bytes = total;
    QC_TRY(qc_cuda_check_blas(cb, cb->api.cublasCreate_v2(&cb->blas), "cublasCreate", err));
    return qc_cuda_check_blas(cb, cb->api.cublasSetStream_v2(cb->blas, cb->stream), "cublasSetStream", err);
}

static void cuda_host_tasks(qc_backend *be, int64_t n_tasks, qc_task_fn fn, void *ctx)
{
    qc_pool_run(((qc_cuda_backend *)be)->pool, n_tasks, fn, ctx);
}

static void cuda_close(qc_backend *be)
{
    qc_cuda_backend *cb = (qc_cuda_backend *)be;
    const qc_cuda_api *api = &cb->api;
    for (int i = 0; i < QC_CUDA_N_SCRATCH; i++)
        qc_cuda_free(cb, cb->scratch[i].address);
    if (cb->stream)
        api->cuStreamSynchronize(cb->stream);
    if (cb->copies)
        api->cuStreamSynchronize(cb->copies);
    if (cb->blas)
        api->cublasDestroy_v2(cb->blas);
    for (int i = 0; i < 2; i++) {
        if (cb->staged[i])
            api->cuEventDestroy_v2(cb->staged[i]);
        if (cb->staging[i].address)
            api->cuMemFreeHost(cb->staging[i].address);
    }
    if (cb->stream)
        api->cuStreamDestroy_v2(cb->stream);
    if (cb->copies)
        api->cuStreamDestroy_v2(cb->copies);
    for (int i = 0; i < QC_CUDA_N_MODULES; i++)
        if (cb->modules[i])
            api->cuModuleUnload(cb->modules[i]);
    if (cb->context)
        api->cuDevicePrimaryCtxRelease_v2(cb->device);
    qc_cuda_api_close(&cb->api);
    qc_free(cb->blocks);
    qc_free(cb);
}

static void cuda_describe(qc_backend *be, qc_device_info *ret)
{
    const qc_cuda_backend *cb = (const qc_cuda_backend *)be;
    *ret = cb->info;
    ret->peak_bytes = cb->bytes_peak;
}

int qc_backend_cuda_new(qc_pool *pool, qc_compute compute, int index, const char *emulator, qc_backend **ret,
                        qc_err *err)
{
    if (!emulator && !qc_backend_cuda_built())
        return qc_fail(err, QC_E_UNSUPPORTED, "this program was built without CUDA kernels");
    qc_cuda_backend *cb = qc_calloc(1, sizeof *cb);
    if (!cb)
        return qc_fail_nomem(err, "CUDA backend", sizeof *cb);
    cb->pool = pool;
    snprintf(cb->name, sizeof cb->name, emulator ? "emulated:%d" : "cuda:%d", index);
    cb->be = (qc_backend){
        .name = cb->name,
        .compute = compute,
        .n_threads = qc_pool_size(pool),
        .host_memory = false,
        .alloc = cuda_alloc,
        .free = cuda_free,
        .upload = cuda_upload,
        .download = cuda_download,
        .weight_load = qc_cuda_weight_load,
        .weight_free = qc_cuda_weight_free,
        .linear = qc_cuda_linear,
        .host_tasks = cuda_host_tasks,
        .gram = qc_cuda_gram,
        .factor = qc_cuda_factor,
        .factor_solve = qc_cuda_factor_solve,
        .round_forward = qc_cuda_round_forward,
        .descend = qc_cuda_descend,
        .hessian_error = qc_cuda_hessian_error,
        .quantize_rows = qc_cuda_quantize_rows,
        .describe = cuda_describe,
        .close = cuda_close,
    };
    qc_cuda_set_row_operations(&cb->be);
    int rc = qc_cuda_api_open(&cb->api, emulator, err);
    if (rc == QC_OK)
        rc = open_device(cb, index, err);
    if (rc == QC_OK)
        *ret = &cb->be;
    else
        cuda_close(&cb->be);
    return rc;
}
