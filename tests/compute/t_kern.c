/* The kernel slots of every instruction set directly: exp and tanh over their whole range against libm in
 * float64, packing against the reference, the online softmax over blocks against one pass. */
#include "kern.h"

#include "qc_cpu.h"
#include "qc_rng.h"
#include "qc_test.h"
#include "tol.h"

#include <stdbool.h>

static const char *const masks[] = {"", "avx512", "all"};
#define N_MASKS 3

static qc_kern kern_of(int m)
{
    qc_err err;
    qc_kern k;
    ck_assert_int_eq(qc_cpu_set_mask(masks[m], &err), QC_OK);
    qc_kern_init(&k, qc_cpu_flags());
    return k;
}

static float from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Distance in units of the last place of the exact value, where that is a normal number. */
static double ulps(double got, double want)
{
    int e;
    frexp(want, &e);
    return fabs(got - want) / ldexp(1, e - 24);
}

/* softmax with the maximum held at 0 gives exp of every x <= 0: 1 in 1009 of all floats there. */
START_TEST(exp_within_one_ulp)
{
    enum { N = 1000 };
    for (int m = 0; m < N_MASKS; m++) {
        qc_kern k = kern_of(m);
        double worst = 0;
        for (uint32_t u = 0x80000000u; u < 0xc2f00000u;) { /* -0 .. -120 */
            float x[N], y[N];
            for (int i = 0; i < N; i++, u += 1009)
                y[i] = x[i] = from_bits(u < 0xc2f00000u ? u : 0xc2f00000u);
            qc_softmax_state s = {.max = 0, .sum = 0};
            k.softmax(y, 0, N, N, &s);
            for (int i = 0; i < N; i++) {
                double want = exp((double)x[i]);
                if (want >= (double)FLT_MIN)
                    worst = fmax(worst, ulps((double)y[i], want));
                else
                    ck_assert(y[i] >= 0 && fabs((double)y[i] - want) <= TOL_TINY);
            }
        }
        printf("exp, mask '%s': %.3f ulp\n", masks[m], worst);
        ck_assert_msg(worst <= 1, "exp is off by %g ulp (mask '%s')", worst, masks[m]);
    }
}
END_TEST

START_TEST(tanh_relative)
{
    enum { N = 1000 };
    for (int m = 0; m < N_MASKS; m++) {
        qc_kern k = kern_of(m);
        double worst = 0;
        for (uint32_t u = 0x00800000u; u < 0x7f000000u;) {
            float x[N], y[N];
            for (int i = 0; i < N; i++, u += 2003)
                x[i] = from_bits((u < 0x7f000000u ? u : 0x7f000000u) | ((uint32_t)i & 1) << 31);
            k.softcap(y, x, 1, N);
            for (int i = 0; i < N; i++)
                worst = fmax(worst, fabs((double)y[i] / tanh((double)x[i]) - 1));
        }
        printf("tanh, mask '%s': %.3f u\n", masks[m], worst / TOL_U);
        ck_assert_msg(worst <= TOL_EXP, "tanh is off by %g (mask '%s')", worst, masks[m]);
    }
}
END_TEST

START_TEST(pack)
{
    enum { MAX_K = 70, LDS = 75 };
    static float src[QC_KERN_MAX_NR * LDS], dst[QC_KERN_MAX_NR * MAX_K + 1];
    for (int i = 0; i < QC_KERN_MAX_NR * LDS; i++)
        src[i] = (float)(i + 1);
    for (int m = 0; m < N_MASKS; m++) {
        qc_kern k = kern_of(m);
        ck_assert_int_le(k.nr, QC_KERN_MAX_NR);
        for (int n = 1; n <= k.nr; n++)
            for (int len = 0; len <= MAX_K; len++) {
                dst[len * k.nr] = -1;
                k.pack(dst, src, LDS, n, len);
                ck_assert(dst[len * k.nr] == -1);
                for (int j = 0; j < len; j++)
                    for (int i = 0; i < k.nr; i++)
                        ck_assert(dst[j * k.nr + i] == (i < n ? src[i * LDS + j] : 0));
            }
    }
}
END_TEST

/* Every instruction set adds the same products in the same order. */
START_TEST(dots)
{
    enum { K = 37 };
    qc_rng rng;
    qc_rng_seed(&rng, 9);
    static float a[K * QC_KERN_MAX_NR], b[K * QC_KERN_MAX_NR];
    for (int i = 0; i < K * QC_KERN_MAX_NR; i++) {
        a[i] = (float)qc_rng_normal(&rng);
        b[i] = (float)(1e3 * qc_rng_normal(&rng));
    }
    for (int m = 0; m < N_MASKS; m++) {
        qc_kern k = kern_of(m);
        double got[QC_KERN_MAX_NR] = {0}, want[QC_KERN_MAX_NR] = {0};
        for (int part = 0; part < 2; part++) {
            int first = part ? 11 : 0, n = part ? K - 11 : 11;
            k.add_dots(got, a + first * k.nr, b + first * k.nr, n, part + 1);
            for (int i = first * k.nr; i < (first + n) * k.nr; i++)
                want[i % k.nr] += (part + 1) * ((double)a[i] * (double)b[i]);
        }
        ck_assert_mem_eq(got, want, (size_t)k.nr * sizeof *got);
    }
}
END_TEST

/* Blocks in turn, with rising and falling maxima, against float64 over the whole row. */
START_TEST(softmax_in_blocks)
{
    enum { N = 300, BLOCK = 37 };
    qc_rng rng;
    qc_rng_seed(&rng, 7);
    float x[N];
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < N; i++) {
        x[i] = (float)(20 * qc_rng_normal(&rng));
        max = fmax(max, (double)x[i]);
    }
    for (int i = 0; i < N; i++)
        sum += exp((double)x[i] - max);
    for (int m = 0; m < N_MASKS; m++) {
        qc_kern k = kern_of(m);
        qc_softmax_state s = {.max = -FLT_MAX, .sum = 0};
        for (int i = 0; i < N; i += BLOCK) {
            float block[BLOCK + 2];
            int n = N - i < BLOCK ? N - i : BLOCK;
            memcpy(block + 1, x + i, (size_t)n * sizeof *x);
            block[0] = block[n + 1] = NAN; /* unseen: become 0 */
            float shrink = k.softmax(block, 1, n + 1, n + 2, &s);
            ck_assert(shrink >= 0 && shrink <= 1);
            ck_assert(block[0] == 0 && block[n + 1] == 0);
        }
        ck_assert((double)s.max == max);
        ck_assert_msg(fabs((double)s.sum / sum - 1) < TOL_EXP, "sum %.9g, expected %.9g (mask '%s')",
                      (double)s.sum, sum, masks[m]);
    }
}
END_TEST

/* A NaN among the seen scores must not vanish. */
START_TEST(softmax_keeps_nan)
{
    for (int m = 0; m < N_MASKS; m++) {
        qc_kern k = kern_of(m);
        for (int at = 0; at < 40; at++) {
            float x[40] = {0};
            x[at] = NAN;
            qc_softmax_state s = {.max = -FLT_MAX, .sum = 0};
            k.softmax(x, 0, 40, 40, &s);
            ck_assert(isnan(s.sum));
        }
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"exp_within_one_ulp", exp_within_one_ulp},
        {"tanh_relative", tanh_relative},
        {"pack", pack},
        {"dots", dots},
        {"softmax_in_blocks", softmax_in_blocks},
        {"softmax_keeps_nan", softmax_keeps_nan},
        {NULL, NULL},
    };
    return run_tests("kern", cases);
}
