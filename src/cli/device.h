/* run.device: which backend computes, and how a report calls it. */
#ifndef QC_CLI_DEVICE_H
#define QC_CLI_DEVICE_H

#include "backend.h"
#include "recipe.h"

/* Open what run.device and run.compute ask for. `auto` is the first CUDA device if this build has kernels for
 * it, else the CPU; why not the device is a line at level info. QC_E_UNSUPPORTED: a device was asked for by
 * name that can not be had. */
int qc_device_open(const qc_recipe_run *run, qc_pool *pool, qc_backend **ret, qc_err *err) QC_WARN_UNUSED;

/* Names for reports and journals. */
typedef struct qc_device_text {
    char kernels[192]; /* the instruction sets of the CPU, or "NVIDIA H200 sm_90": results may depend on it */
    char detail[192];  /* "driver 13.0, 1980 MHz, 143.8 GB"; "" for the CPU */
    uint64_t peak_bytes; /* most memory of the device in use so far; 0 for the CPU */
} qc_device_text;
qc_device_text qc_device_describe(qc_backend *be);

#endif
