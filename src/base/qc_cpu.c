#include "qc_cpu.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

static const struct {
    const char *name;
    uint32_t flag;
    uint32_t needs; /* features without which this one is not used */
} features[] = {
    {"avx2", QC_CPU_AVX2, 0},
    {"avx512", QC_CPU_AVX512, QC_CPU_AVX2},
    {"avx512vnni", QC_CPU_AVX512VNNI, QC_CPU_AVX512},
    {"avx512bf16", QC_CPU_AVX512BF16, QC_CPU_AVX512},
    {"amx", QC_CPU_AMX, QC_CPU_AVX512BF16},
    {"neon", QC_CPU_NEON, 0},
    {"dotprod", QC_CPU_DOTPROD, QC_CPU_NEON},
};
#define N_FEATURES (sizeof features / sizeof features[0])

static uint32_t hidden;

static uint32_t detect(void)
{
    uint32_t flags = 0;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    __builtin_cpu_init();
    /* clang 14 does not know the name "f16c": leaf 1 ecx bit 29 */
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c)
        flags |= QC_CPU_AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        flags |= QC_CPU_AVX512;
    if (__builtin_cpu_supports("avx512vnni"))
        flags |= QC_CPU_AVX512VNNI;
    if (__builtin_cpu_supports("avx512bf16"))
        flags |= QC_CPU_AVX512BF16;
    /* cpuid leaf 7 edx: 22 amx-bf16, 24 amx-tile, 25 amx-int8; then the kernel must grant tile state 18 */
    const unsigned amx = 1u << 22 | 1u << 24 | 1u << 25;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & amx) == amx &&
        syscall(SYS_arch_prctl, 0x1023, 18) == 0)
        flags |= QC_CPU_AMX;
#elif defined(__aarch64__)
    flags |= QC_CPU_NEON;
    if (getauxval(AT_HWCAP) & (1u << 20))
        flags |= QC_CPU_DOTPROD;
#endif
    return flags;
}

uint32_t qc_cpu_flags(void)
{
    static uint32_t detected;
    static bool done;
    if (!done) {
        detected = detect();
        done = true;
    }
    uint32_t flags = detected & ~hidden;
    for (size_t i = 0; i < N_FEATURES; i++) /* table order: a needed feature stands before its users */
        if ((flags & features[i].needs) != features[i].needs)
            flags &= ~features[i].flag;
    return flags;
}

int qc_cpu_set_mask(const char *names, qc_err *err)
{
    uint32_t mask = 0;
    for (const char *p = names; *p;) {
        size_t n = strcspn(p, ","), i = 0;
        if (n == 3 && memcmp(p, "all", 3) == 0)
            mask = UINT32_MAX;
        else {
            while (i < N_FEATURES && (strlen(features[i].name) != n || memcmp(features[i].name, p, n) != 0))
                i++;
            if (i == N_FEATURES)
                return qc_fail(err, QC_E_USAGE,
                               "unknown cpu feature '%.*s' (avx2, avx512, avx512vnni, avx512bf16, amx, neon, "
                               "dotprod, all)",
                               (int)n, p);
            mask |= features[i].flag;
        }
        p += n + (p[n] == ',');
    }
    hidden = mask;
    return QC_OK;
}

const char *qc_cpu_describe(void)
{
    static char text[128];
    uint32_t flags = qc_cpu_flags();
    size_t n = 0;
    text[0] = 0;
    for (size_t i = 0; i < N_FEATURES; i++)
        if (flags & features[i].flag)
            n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", n ? "+" : "", features[i].name);
    return n ? text : "scalar";
}
