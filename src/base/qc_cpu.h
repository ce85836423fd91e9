/* What the processor can do. Kernels are chosen at run time from detected & mask; nothing is built for the
 * build machine. */
#ifndef QC_CPU_H
#define QC_CPU_H

#include "qc_err.h"

#include <stdint.h>

enum {
    QC_CPU_AVX2 = 1u << 0,       /* AVX2 + FMA + F16C */
    QC_CPU_AVX512 = 1u << 1,     /* F, BW, DQ, VL */
    QC_CPU_AVX512VNNI = 1u << 2, /* with AVX512 */
    QC_CPU_AVX512BF16 = 1u << 3, /* with AVX512 */
    QC_CPU_AMX = 1u << 4, /* tiles, bf16 and int8, permitted by the kernel; with AVX512BF16 */
    QC_CPU_NEON = 1u << 5,
    QC_CPU_DOTPROD = 1u << 6
};

/* Detected features without the masked ones. */
uint32_t qc_cpu_flags(void);

/* Names to hide, comma separated: "avx512,amx", "all" hides everything (scalar reference kernels), "" hides
 * nothing. A feature hides those built on it. Call before any kernel table is made. QC_E_USAGE: unknown name.
 */
int qc_cpu_set_mask(const char *names, qc_err *err) QC_WARN_UNUSED;

/* "avx2+avx512+..." of qc_cpu_flags(), "scalar" if none; static storage. */
const char *qc_cpu_describe(void);

#endif
