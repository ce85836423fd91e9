/* What only a device has: its failures, each of which must end in one clear line and give everything back
 * (the emulator ends the program where a buffer is left); codes with the CPU's bits; and the emulator's own
 * checks, without which the other tests on it would say little. */
#include "api.h"
#include "backend.h"
#include "kernels.h"
#include "qc_alloc.h"
#include "qc_rng.h"
#include "qc_test.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *emulator;
static void (*configure)(const char *);
static qc_err err;

static qc_backend *open_emulated(qc_compute compute, const char *settings)
{
    qc_backend *be = NULL;
    configure(settings);
    ck_assert_msg(qc_backend_cuda_new(NULL, compute, 0, emulator, &be, &err) == QC_OK, "%s", err.msg);
    return be;
}

/* ---- quantize_rows: the CPU's bits ---- */

enum { ROWS = 5, COLS = 150, MAX_GROUPS = COLS };

typedef struct coded {
    uint8_t codes[ROWS * COLS], zeros[ROWS * MAX_GROUPS];
    float scales[ROWS * MAX_GROUPS];
    qc_quant_stats stats;
} coded;

static coded quantize(qc_backend *be, const float *w, const float *weights, const qc_quant_spec *spec)
{
    coded c;
    memset(&c, 0, sizeof c);
    qc_code_rows rows = {
        .codes = c.codes, .scales = c.scales, .zeros = spec->grid.symmetric ? NULL : c.zeros};
    ck_assert_int_eq(be->quantize_rows(be, w, ROWS, COLS, spec, weights, &rows, &c.stats, &err), QC_OK);
    ck_assert_int_eq(rows.n_rows, ROWS);
    return c;
}

START_TEST(same_codes_as_cpu)
{
    static const qc_dtype dtypes[] = {QC_DT_F16, QC_DT_BF16, QC_DT_F32};
    static const int64_t groups[] = {16, 32, 47, COLS};
    qc_backend *cpu, *device = open_emulated(QC_COMPUTE_F32, "");
    qc_rng rng;
    float w[ROWS * COLS], weights[COLS];
    qc_rng_seed(&rng, 7);
    ck_assert_int_eq(qc_backend_cpu_new(NULL, QC_COMPUTE_F32, &cpu, &err), QC_OK);
    for (int i = 0; i < 7 * 2 * 2 * 4 * 3; i++) {
        int bits = 2 + i % 7, turn = i / 7;
        qc_quant_spec spec = {.grid = {.kind = QC_GRID_AFFINE,
                                       .bits = bits,
                                       .symmetric = turn % 2,
                                       .group_elems = groups[turn / 4 % 4],
                                       .scale_dtype = dtypes[i % 3]},
                              .sym_rule = (qc_sym_rule)(turn % 3),
                              .search = turn / 2 % 2 ? QC_SEARCH_MSE : QC_SEARCH_MINMAX};
        for (int j = 0; j < ROWS * COLS; j++)
            w[j] = (float)(qc_rng_normal(&rng) * (j % 91 == 0 ? 20 : 1)) * (j < COLS ? 1e-8f : 1);
        memset(w + 3 * COLS, 0, 64 * sizeof *w); /* whole groups of zeros */
        for (int j = 0; j < COLS; j++)
            weights[j] = (float)(qc_rng_uniform(&rng) * (j % 10 != 0));
        coded a = quantize(cpu, w, i % 2 ? weights : NULL, &spec),
              b = quantize(device, w, i % 2 ? weights : NULL, &spec);
        ck_assert_msg(memcmp(&a, &b, sizeof a) == 0, "case %d: %d bits, groups of %d: other codes or sums", i,
                      bits, (int)spec.grid.group_elems);
    }
    qc_backend_close(cpu);
    qc_backend_close(device);
}
END_TEST

/* ---- failures ---- */

static int fetch(void *ctx, int64_t row0, int64_t n_rows, float *dst, qc_err *e)
{
    (void)ctx;
    (void)row0;
    (void)e;
    for (int64_t i = 0; i < n_rows * 40; i++)
        dst[i] = (float)(i % 7) - 3;
    return QC_OK;
}

enum { N = 40 };

typedef struct life {
    float *h, *x, *e;
    qc_weight *w;
} life;

static int rounding(qc_backend *be, const life *l, qc_err *e)
{
    uint8_t codes[N * N];
    float scales[N * 3];
    double pivots[N], errors[N];
    int64_t bad;
    qc_grid grid = {
        .kind = QC_GRID_AFFINE, .bits = 4, .symmetric = true, .group_elems = 16, .scale_dtype = QC_DT_F16};
    qc_quant_spec spec = {.grid = grid, .search = QC_SEARCH_MSE};
    qc_round_rows rows = {
        .n_rows = N, .n_cols = N, .target = l->x, .error = l->e, .codes = codes, .scales = scales};
    qc_code_rows coded_rows = {.codes = codes, .scales = scales};
    qc_quant_stats stats = {0};
    float w[N * N];
    QC_TRY(be->download(be, w, l->x, N * N, e));
    QC_TRY(be->quantize_rows(be, w, N, N, &spec, NULL, &coded_rows, &stats, e));
    QC_TRY(be->mirror(be, l->h, N, e));
    QC_TRY(be->factor(be, l->h, N, pivots, &bad, e));
    QC_TRY(be->round_forward(be, l->h, &grid, &rows, e));
    QC_TRY(be->descend(be, l->h, l->x, &grid, &rows, 1, true, e));
    QC_TRY(be->hessian_error(be, l->h, l->e, N, N, errors, e));
    return be->factor_solve(be, l->h, pivots, l->e, N, N, e);
}

static int operations(qc_backend *be, life *l, qc_err *e)
{
    static const float identity[N * N + N] = {[0] = 1};
    qc_score scores[N];
    int32_t targets[N] = {0};
    qc_attention_shape s = {N, 2, 1, 20, 0, 1, 0};
    float **buffers[] = {&l->h, &l->x, &l->e};
    for (int i = 0; i < N; i++)
        scores[i] = qc_score_start();
    for (int i = 0; i < 3; i++) {
        if (!(*buffers[i] = be->alloc(be, N * N, e)))
            return e->code;
        QC_TRY(be->upload(be, *buffers[i], identity, N * N, e));
    }
    QC_TRY(be->weight_load(be, N, N, fetch, NULL, &l->w, e));
    QC_TRY(be->linear(be, l->x, N, l->h, N, l->w, l->e, N, false, e));
    QC_TRY(be->gram(be, l->h, l->x, N, NULL, 0, N, N, N, 1, e));
    QC_TRY(be->attention(be, l->e, l->x, l->x, l->x, &s, e));
    QC_TRY(be->score(be, scores, l->x, l->e, N, targets, N, 0, N, 0, e));
    return rounding(be, l, e);
}

/* A backend's life, as far as it goes. */
static int whole_life(qc_compute compute, qc_err *e)
{
    qc_backend *be = NULL;
    life l = {0};
    int rc = qc_backend_cuda_new(NULL, compute, 0, emulator, &be, e);
    if (rc < 0)
        return rc;
    rc = operations(be, &l, e);
    be->weight_free(be, l.w);
    be->free(be, l.h);
    be->free(be, l.x);
    be->free(be, l.e);
    qc_backend_close(be);
    return rc;
}

static void expect_failure(qc_compute compute, const char *settings, int code, const char *text)
{
    qc_err e = {0};
    configure(settings);
    int rc = whole_life(compute, &e);
    ck_assert_msg(rc == code && e.code == code, "%s: %d, expected %d: %s", settings, rc, code, e.msg);
    ck_assert_msg(strstr(e.msg, text), "%s: '%s' does not say '%s'", settings, e.msg, text);
}

/* Makes the calls of `call` in a backend's life fail in turn, of many only every step-th. */
static void fail_each(qc_compute compute, const char *call, int step, int with, int code, const char *text)
{
    char settings[64];
    long (*calls)(void);
    void *library = dlopen(emulator, RTLD_NOW), *p = dlsym(library, "qc_emulation_calls");
    memcpy(&calls, &p, sizeof p);
    snprintf(settings, sizeof settings, "%s:0:%d", call, with);
    configure(settings);
    qc_err e = {0};
    ck_assert_msg(whole_life(compute, &e) == QC_OK, "%s", e.msg);
    long n = calls();
    ck_assert_msg(n > 0, "%s is never called", call);
    for (long i = 1; i <= n; i += i < 5 ? 1 : step) {
        snprintf(settings, sizeof settings, "%s:%ld:%d", call, i, with);
        expect_failure(compute, settings, code, text);
    }
    dlclose(library);
}

START_TEST(out_of_device_memory)
{
    fail_each(QC_COMPUTE_F32, "cuMemAllocAsync", 1, 2, QC_E_RESOURCE, "out of device memory");
    fail_each(QC_COMPUTE_BF16, "cuMemAllocAsync", 1, 2, QC_E_RESOURCE, "out of device memory");
    expect_failure(QC_COMPUTE_F32, "memory:8000", QC_E_RESOURCE,
                   "out of device memory (cuMemAllocAsync; 0 MB");
    fail_each(QC_COMPUTE_F32, "cuMemAllocHost", 1, 2, QC_E_RESOURCE, "pinned staging");
    expect_failure(QC_COMPUTE_F32, "cublasCreate:1:3", QC_E_RESOURCE, "out of device memory (cublasCreate)");
}
END_TEST

START_TEST(device_lost)
{
    static const char *const calls[] = {"cuLaunchKernel",     "cuMemcpyHtoDAsync",  "cuMemcpyDtoHAsync",
                                        "cublasGemmEx",       "cublasSsyrk",        "cublasStrsm",
                                        "cuEventRecord",      "cuEventSynchronize", "cuStreamWaitEvent",
                                        "cuFuncSetAttribute", "cuMemsetD32Async"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        fail_each(QC_COMPUTE_F32, calls[i], 30, 700, QC_E_RESOURCE, "emulated:0: the device is lost: ");
        if (i < 4)
            fail_each(QC_COMPUTE_BF16, calls[i], 30, 700, QC_E_RESOURCE, "the device is lost");
    }
    expect_failure(QC_COMPUTE_F32, "cuStreamSynchronize:1:700", QC_E_RESOURCE, "the device is lost");
    static const char *const opening[] = {"cuInit",          "cuDeviceGetCount", "cuDevicePrimaryCtxRetain",
                                          "cuCtxSetCurrent", "cuModuleLoadData", "cuModuleGetFunction",
                                          "cuStreamCreate",  "cuEventCreate",    "cuMemGetInfo"};
    for (size_t i = 0; i < sizeof opening / sizeof *opening; i++)
        fail_each(QC_COMPUTE_F32, opening[i], 1, 719, QC_E_RESOURCE, "the device is lost");
}
END_TEST

START_TEST(no_such_device)
{
    qc_backend *be = NULL;
    expect_failure(QC_COMPUTE_F32, "cuModuleLoadData:1:209,architecture:75", QC_E_UNSUPPORTED,
                   "emulated:0: the kernels were not built for this device (compute capability 7.5");
    expect_failure(QC_COMPUTE_F32, "devices:0", QC_E_UNSUPPORTED, "no CUDA device on this machine");
    configure("");
    ck_assert_int_eq(qc_backend_cuda_new(NULL, QC_COMPUTE_F32, 3, emulator, &be, &err), QC_E_UNSUPPORTED);
    ck_assert_str_eq(err.msg, "no CUDA device 3 on this machine, which has 1");
    ck_assert_int_eq(qc_backend_cuda_new(NULL, QC_COMPUTE_F32, 0, "/nowhere/lib.so", &be, &err),
                     QC_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(err.msg, "/nowhere/lib.so"));
    ck_assert_ptr_null(be);
}
END_TEST

/* A driver that is not there: the reason, and no crash. With one this says nothing. */
START_TEST(driver_missing)
{
    qc_backend *be = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver)
        return;
    ck_assert_int_eq(qc_backend_cuda_new(NULL, QC_COMPUTE_F32, 0, NULL, &be, &err), QC_E_UNSUPPORTED);
    ck_assert_str_eq(err.msg, qc_backend_cuda_built() ? "no CUDA driver on this machine (libcuda.so.1)"
                                                      : "this program was built without CUDA kernels");
}
END_TEST

START_TEST(out_of_host_memory)
{
    qc_err e = {0};
    configure("");
    qc_alloc_fail_at(0);
    ck_assert_int_eq(whole_life(QC_COMPUTE_BF16, &e), QC_OK);
    long n = qc_alloc_fail_at(0);
    ck_assert_int_ge(n, 5);
    for (long i = 1; i <= n; i++) {
        qc_alloc_fail_at(i);
        ck_assert_int_eq(whole_life(QC_COMPUTE_BF16, &e), QC_E_RESOURCE);
        ck_assert(e.code == QC_E_RESOURCE && e.msg[0]);
    }
    qc_alloc_fail_at(0);
}
END_TEST

START_TEST(describes_itself)
{
    qc_device_info info;
    qc_backend *be = open_emulated(QC_COMPUTE_F32, "architecture:87,memory:100000");
    ck_assert_str_eq(be->name, "emulated:0");
    float *a = be->alloc(be, 1000, &err), *b = be->alloc(be, 500, &err);
    be->free(be, a);
    be->describe(be, &info);
    ck_assert_str_eq(info.name, "emulated device");
    ck_assert_int_eq(info.capability, 87);
    ck_assert_int_eq(info.clock_mhz, 1000);
    ck_assert_int_eq(info.driver, 13000);
    ck_assert_uint_eq(info.memory_bytes, 100000);
    ck_assert_uint_eq(info.peak_bytes, 6000);
    ck_assert_ptr_null(be->alloc(be, 1 << 20, &err));
    ck_assert_int_eq(err.code, QC_E_RESOURCE);
    be->free(be, b);
    qc_backend_close(be);
}
END_TEST

/* ---- the emulator's checks ---- */

static unsigned launch(const qc_cuda_api *api, const char *name, float *y)
{
    qc_cu_function function;
    qc_cuda_pair_args args = {.y = y, .n = 64};
    void *params[] = {&args};
    configure("");
    ck_assert_int_eq(api->cuModuleGetFunction(&function, NULL, name), 0);
    ck_assert_int_eq(api->cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 256, NULL, params, NULL), 0);
    return api->cuStreamSynchronize(NULL);
}

START_TEST(emulator_finds_faults)
{
    static const char *const faulty[] = {"read",      "write",  "vector", "barrier", "reuse",
                                         "unwritten", "shared", "exit",   "shuffle"};
    qc_cuda_api api;
    qc_cu_address address;
    float host[64], back[64];
    ck_assert_int_eq(qc_cuda_api_open(&api, emulator, &err), QC_OK);
    configure("");
    ck_assert_int_eq(api.cuMemAllocAsync(&address, sizeof host, NULL), 0);
    float *y = (float *)(uintptr_t)address;
    ck_assert_int_eq(launch(&api, "qc_cuda_faulty_none", y), 0);
    ck_assert_int_eq(api.cuMemcpyDtoHAsync_v2(back, address, sizeof back, NULL), 0);
    for (int i = 0; i < 64; i++)
        ck_assert(back[i] == (float)(63 - i) + 1);
    for (size_t i = 0; i < sizeof faulty / sizeof *faulty; i++) {
        char name[64];
        snprintf(name, sizeof name, "qc_cuda_faulty_%s", faulty[i]);
        ck_assert_msg(launch(&api, name, y) == 700, "%s goes unseen", name);
        ck_assert_int_eq(launch(&api, "qc_cuda_faulty_none", y), 0); /* and the emulator recovers */
    }
    ck_assert_int_eq(launch(&api, "qc_cuda_faulty_none", host), 700);
    ck_assert_int_eq(launch(&api, "qc_cuda_faulty_none", y + 1), 700);
    configure("");
    ck_assert_int_ne(api.cuMemcpyHtoDAsync_v2(address + 4, host, sizeof host, NULL), 0);
    configure("");
    ck_assert_int_ne(api.cuMemcpyHtoDAsync_v2((uintptr_t)back, host, sizeof host, NULL), 0);
    configure("");
    ck_assert_int_ne(api.cuMemcpyDtoHAsync_v2(y, address, sizeof host, NULL), 0);
    configure("");
    ck_assert_int_eq(api.cuMemFreeAsync(address, NULL), 0);
    ck_assert_int_eq(launch(&api, "qc_cuda_faulty_none", y), 700);
    configure("");
    qc_cuda_api_close(&api);
}
END_TEST

/* Whether a function ends its process in another way than by returning. */
static bool ends_process(void (*fn)(void))
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        fn();
        _exit(0);
    }
    ck_assert(child > 0 && waitpid(child, &status, 0) == child);
    return status != 0;
}

static void leak(void)
{
    qc_backend *be = open_emulated(QC_COMPUTE_F32, "");
    if (be->alloc(be, 5, &err))
        qc_backend_close(be);
}

static void read_on_host(void)
{
    qc_backend *be = open_emulated(QC_COMPUTE_F32, "");
    volatile float *p = be->alloc(be, 5, &err);
    (void)p[0];
}

START_TEST(emulator_ends_programs)
{
    ck_assert(ends_process(leak));
    ck_assert(ends_process(read_on_host));
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"same_codes_as_cpu", same_codes_as_cpu},
        {"out_of_device_memory", out_of_device_memory},
        {"device_lost", device_lost},
        {"no_such_device", no_such_device},
        {"driver_missing", driver_missing},
        {"out_of_host_memory", out_of_host_memory},
        {"describes_itself", describes_itself},
        {"emulator_finds_faults", emulator_finds_faults},
        {"emulator_ends_programs", emulator_ends_programs},
        {NULL, NULL},
    };
    emulator = getenv("QC_CUDA_EMULATOR");
    if (!emulator)
        TEST_SKIP("no emulator: this build has no C++ compiler");
    void *library = dlopen(emulator, RTLD_NOW),
         *p = library ? dlsym(library, "qc_emulation_configure") : NULL;
    if (!p) {
        printf("%s\n", dlerror());
        return 1;
    }
    memcpy(&configure, &p, sizeof p);
    return run_tests("cuda", cases);
}
