/* Choice of the kernels: reference first, then each instruction set in ascending order. */
#include "kern.h"
#include "kern_bf16.h"
#include "qc_cpu.h"

void qc_kern_init(qc_kern *kern, uint32_t cpu_flags)
{
    qc_kern_init_ref(kern);
    qc_kern_init_quant_ref(kern);
#if defined(__x86_64__)
    if (cpu_flags & QC_CPU_AVX2) {
        qc_kern_init_avx2(kern);
        qc_kern_init_quant_avx2(kern);
    }
    if (cpu_flags & QC_CPU_AVX512) {
        qc_kern_init_avx512(kern);
        qc_kern_init_quant_avx512(kern);
    }
#elif defined(__aarch64__)
    if (cpu_flags & QC_CPU_NEON) {
        qc_kern_init_neon(kern);
        qc_kern_init_quant_neon(kern);
    }
#else
    (void)cpu_flags;
#endif
}

void qc_kern_bf16_init(qc_kern_bf16 *kern, uint32_t cpu_flags)
{
    qc_kern_bf16_init_ref(kern);
#if defined(__x86_64__)
    if (cpu_flags & QC_CPU_AVX2)
        qc_kern_bf16_init_avx2(kern);
    if (cpu_flags & QC_CPU_AVX512)
        qc_kern_bf16_init_avx512(kern);
    if (cpu_flags & QC_CPU_AVX512BF16)
        qc_kern_bf16_init_avx512bf16(kern);
    if (cpu_flags & QC_CPU_AMX)
        qc_kern_bf16_init_amx(kern);
#elif defined(__aarch64__)
    if (cpu_flags & QC_CPU_NEON)
        qc_kern_bf16_init_neon(kern);
#else
    (void)cpu_flags;
#endif
}
