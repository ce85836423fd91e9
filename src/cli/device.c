#include "device.h"

#include "qc_cpu.h"
#include "qc_log.h"

#include <stdio.h>
#include <stdlib.h>

/* The emulator is a library of the tests; its path is none of a recipe's business. */
static int open_emulated(qc_pool *pool, qc_compute compute, qc_backend **ret, qc_err *err)
{
    const char *path = getenv("QC_CUDA_EMULATOR");
    if (!path)
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "run.device: emulated is for tests: set QC_CUDA_EMULATOR to the emulator's library");
    return qc_backend_cuda_new(pool, compute, 0, path, ret, err);
}

int qc_device_open(const qc_recipe_run *run, qc_pool *pool, qc_backend **ret, qc_err *err)
{
    qc_compute compute = (qc_compute)run->compute;
    if (run->device == QC_DEVICE_EMULATED)
        return open_emulated(pool, compute, ret, err);
    if (run->device >= QC_DEVICE_CUDA) {
        int index = run->device == QC_DEVICE_CUDA ? 0 : run->device - QC_DEVICE_CUDA_0;
        int rc = qc_backend_cuda_new(pool, compute, index, NULL, ret, err);
        return rc < 0 ? qc_err_prefix(err, "run.device: ") : rc;
    }
    /* the kernels have run under emulation only: a device is taken by who asks for it */
    if (run->device == QC_DEVICE_AUTO && qc_backend_cuda_built())
        qc_log(QC_LOG_INFO, "computing on the CPU; --device cuda takes a GPU");
    return qc_backend_cpu_new(pool, compute, ret, err);
}

qc_device_text qc_device_describe(qc_backend *be)
{
    qc_device_info info;
    qc_device_text t = {.peak_bytes = 0};
    be->describe(be, &info);
    if (be->host_memory) {
        snprintf(t.kernels, sizeof t.kernels, "%s", qc_cpu_describe());
        return t;
    }
    snprintf(t.kernels, sizeof t.kernels, "%s sm_%d", info.name, info.capability);
    snprintf(t.detail, sizeof t.detail, "driver %d.%d, %d MHz, %.1f GB", info.driver / 1000,
             info.driver % 1000 / 10, info.clock_mhz, (double)info.memory_bytes / 1e9);
    t.peak_bytes = info.peak_bytes;
    return t;
}
