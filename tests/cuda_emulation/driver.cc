/* The calls of the CUDA driver that the backend makes. Streams do their work at once. */
#include "emulation_internal.h"

#include <cstdio>
#include <cstdlib>
#include <set>

using namespace emulation;

namespace emulation
{
extern int n_devices, architecture;
}
extern "C" void qc_emulation_configure(const char *text);

static std::set<void *> host_blocks;
static long n_objects; /* streams, events and modules that are open */
static long n_contexts;

/* Objects are addresses without content. */
static void *object_new()
{
    n_objects++;
    return malloc(1);
}

static void object_free(void *p)
{
    n_objects--;
    free(p);
}

#define BEGIN(name)                                                                                          \
    if (int begin_code_ = begin_call(name))                                                                  \
    return begin_code_

extern "C" {

int cuInit(unsigned)
{
    if (const char *text = getenv("QC_EMULATION"))
        qc_emulation_configure(text);
    BEGIN("cuInit");
    return n_devices > 0 ? SUCCESS : NO_DEVICE;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

int cuGetErrorName(int code, const char **name)
{
    static char text[32];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", code);
    *name = code == OUT_OF_MEMORY       ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == ILLEGAL_ADDRESS   ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : code == NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
                                        : text;
    return SUCCESS;
}

int cuDeviceGetCount(int *count)
{
    BEGIN("cuDeviceGetCount");
    *count = n_devices;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal)
{
    BEGIN("cuDeviceGet");
    if (ordinal < 0 || ordinal >= n_devices)
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetName(char *name, int n, int)
{
    snprintf(name, (size_t)n, "emulated device");
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, unsigned attribute, int)
{
    BEGIN("cuDeviceGetAttribute");
    switch (attribute) {
    case 13: /* clock in kHz */
        *value = 1000000;
        return SUCCESS;
    case 16: /* multiprocessors */
        *value = 2;
        return SUCCESS;
    case 75: /* compute capability */
        *value = architecture / 10;
        return SUCCESS;
    case 76:
        *value = architecture % 10;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void **context, int)
{
    BEGIN("cuDevicePrimaryCtxRetain");
    *context = context; /* any address will do */
    n_contexts++;
    return SUCCESS;
}

/* The end of the last backend: whatever was not given back is a leak, and the program ends. */
int cuDevicePrimaryCtxRelease_v2(int)
{
    if (--n_contexts > 0)
        return SUCCESS;
    if (buffers_left() > 0 || n_objects > 0 || !host_blocks.empty()) {
        fprintf(stderr,
                "emulated device: leak: %zu buffers, %zu pinned blocks, %ld streams, events and modules\n",
                buffers_left(), host_blocks.size(), n_objects);
        abort();
    }
    return SUCCESS;
}

int cuCtxSetCurrent(void *)
{
    BEGIN("cuCtxSetCurrent");
    return SUCCESS;
}

int cuModuleLoadData(void **module, const void *)
{
    BEGIN("cuModuleLoadData");
    *module = object_new();
    return SUCCESS;
}

int cuModuleUnload(void *module)
{
    object_free(module);
    return SUCCESS;
}

int cuModuleGetFunction(const void **function, void *, const char *name)
{
    BEGIN("cuModuleGetFunction");
    *function = find_kernel(name);
    return *function ? SUCCESS : NOT_FOUND;
}

int cuFuncSetAttribute(const void *, unsigned, int)
{
    BEGIN("cuFuncSetAttribute");
    return SUCCESS;
}

int cuLaunchKernel(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared_bytes, void *, void **params, void **)
{
    BEGIN("cuLaunchKernel");
    const kernel *k = static_cast<const kernel *>(function);
    if (gx == 0 || gy == 0 || gy > 65535 || gz != 1 || bx == 0 || by != 1 || bz != 1 || bx > 1024 ||
        bx % 32) {
        fprintf(stderr, "emulated device: kernel %s: grid %u,%u,%u of blocks %u,%u,%u\n", k->name, gx, gy, gz,
                bx, by, bz);
        break_device(INVALID_VALUE);
        return INVALID_VALUE;
    }
    if (launch(k, dim3{gx, gy, gz}, dim3{bx, by, bz}, shared_bytes, params[0]))
        return SUCCESS;
    break_device(ILLEGAL_ADDRESS);
    return SUCCESS; /* as on a device, the host hears of it with a later call */
}

int cuMemAllocAsync(void **address, size_t n_bytes, void *)
{
    BEGIN("cuMemAllocAsync");
    if (n_bytes == 0)
        return INVALID_VALUE;
    *address = buffer_new(n_bytes);
    return *address ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFreeAsync(void *address, void *)
{
    if (buffer_free(address))
        return begin_call("cuMemFreeAsync");
    fprintf(stderr, "emulated device: %p freed, which is no buffer\n", address);
    abort();
}

int cuMemGetInfo_v2(size_t *left, size_t *total)
{
    BEGIN("cuMemGetInfo");
    *left = bytes_free(total);
    return SUCCESS;
}

int cuMemAllocHost_v2(void **p, size_t n_bytes)
{
    BEGIN("cuMemAllocHost");
    *p = malloc(n_bytes);
    host_blocks.insert(*p);
    return *p ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *p)
{
    host_blocks.erase(p);
    free(p);
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(void *dst, const void *src, size_t n_bytes, void *)
{
    BEGIN("cuMemcpyHtoDAsync");
    void *to = buffer_range("cuMemcpyHtoDAsync", dst, n_bytes);
    if (!to || is_device_address(src)) {
        break_device(INVALID_VALUE);
        return INVALID_VALUE;
    }
    memcpy(to, src, n_bytes);
    return SUCCESS;
}

int cuMemcpyDtoHAsync_v2(void *dst, const void *src, size_t n_bytes, void *)
{
    BEGIN("cuMemcpyDtoHAsync");
    void *from = buffer_range("cuMemcpyDtoHAsync", src, n_bytes);
    if (!from || is_device_address(dst)) {
        break_device(INVALID_VALUE);
        return INVALID_VALUE;
    }
    memcpy(dst, from, n_bytes);
    return SUCCESS;
}

int cuMemsetD32Async(void *dst, unsigned value, size_t n, void *)
{
    BEGIN("cuMemsetD32Async");
    void *to = buffer_range("cuMemsetD32Async", dst, 4 * n);
    if (!to) {
        break_device(INVALID_VALUE);
        return INVALID_VALUE;
    }
    for (size_t i = 0; i < n; i++)
        memcpy(static_cast<char *>(to) + 4 * i, &value, 4);
    return SUCCESS;
}

int cuStreamCreate(void **stream, unsigned)
{
    BEGIN("cuStreamCreate");
    *stream = object_new();
    return SUCCESS;
}

int cuStreamDestroy_v2(void *stream)
{
    object_free(stream);
    return SUCCESS;
}

int cuStreamSynchronize(void *)
{
    BEGIN("cuStreamSynchronize");
    return SUCCESS;
}

int cuStreamWaitEvent(void *, void *, unsigned)
{
    BEGIN("cuStreamWaitEvent");
    return SUCCESS;
}

int cuEventCreate(void **event, unsigned)
{
    BEGIN("cuEventCreate");
    *event = object_new();
    return SUCCESS;
}

int cuEventDestroy_v2(void *event)
{
    object_free(event);
    return SUCCESS;
}

int cuEventRecord(void *, void *)
{
    BEGIN("cuEventRecord");
    return SUCCESS;
}

int cuEventSynchronize(void *)
{
    BEGIN("cuEventSynchronize");
    return SUCCESS;
}

} /* extern "C" */
