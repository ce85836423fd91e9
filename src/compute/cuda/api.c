#include "api.h"

#include <dlfcn.h>
#include <string.h>

/* Newest first; the calls have not changed since 11. */
static const char *const driver_names[] = {"libcuda.so.1", NULL};
static const char *const cublas_names[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11",
                                           "libcublas.so", NULL};

static void *open_first(const char *const *names)
{
    void *library = NULL;
    for (int i = 0; names[i] && !library; i++)
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    return library;
}

static int find(void *library, const char *name, void *ret, qc_err *err)
{
    void *p = dlsym(library, name);
    if (!p)
        return qc_fail(err, QC_E_UNSUPPORTED, "the CUDA libraries of this machine have no %s: too old", name);
    memcpy(ret, &p, sizeof p); /* an object pointer is no function pointer in C */
    return QC_OK;
}

static int find_all(qc_cuda_api *api, qc_err *err)
{
#define FIND_DRIVER(name, args) QC_TRY(find(api->driver, #name, &api->name, err));
#define FIND_CUBLAS(name, args) QC_TRY(find(api->cublas, #name, &api->name, err));
    QC_CUDA_DRIVER_CALLS(FIND_DRIVER)
    QC_CUBLAS_CALLS(FIND_CUBLAS)
    return QC_OK;
}

int qc_cuda_api_open(qc_cuda_api *api, const char *emulator, qc_err *err)
{
    *api = (qc_cuda_api){0};
    if (emulator) {
        api->driver = dlopen(emulator, RTLD_NOW | RTLD_LOCAL);
        if (!api->driver)
            return qc_fail(err, QC_E_UNSUPPORTED, "no emulator of a device: %s", dlerror());
        api->cublas = api->driver;
        return find_all(api, err);
    }
    api->driver = open_first(driver_names);
    if (!api->driver)
        return qc_fail(err, QC_E_UNSUPPORTED, "no CUDA driver on this machine (%s)", driver_names[0]);
    api->cublas = open_first(cublas_names);
    if (!api->cublas)
        return qc_fail(err, QC_E_UNSUPPORTED, "the CUDA driver is there but not cuBLAS (%s)",
                       cublas_names[0]);
    return find_all(api, err);
}

void qc_cuda_api_close(qc_cuda_api *api)
{
    if (api->cublas && api->cublas != api->driver)
        dlclose(api->cublas);
    if (api->driver)
        dlclose(api->driver);
    *api = (qc_cuda_api){0};
}
