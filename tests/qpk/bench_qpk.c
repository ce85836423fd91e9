/* Speed of packing and decoding: rows of [4096, 1024] matrices, one thread; also the time from open to the
 * first row of a file with as many tensors as a 0.6B model. Prints medians; run with `meson test
 * --benchmark`. */
#include "qpk_test.h"

#include <time.h>

enum { ROWS = 4096, COLS = 1024, REPEATS = 7 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *t)
{
    qsort(t, REPEATS, sizeof *t, compare);
    return t[REPEATS / 2];
}

static void bench_grid(int bits, int64_t group, bool symmetric)
{
    qc_err err = {0};
    char *path = temp_name("bench.qpk");
    qc_tensor_info info = grid_info("w", ROWS, COLS, bits, group, symmetric, QC_DT_F16);
    qc_code_rows rows = make_rows(&info, 1);
    double pack[REPEATS], decode[REPEATS];
    float *y = malloc(sizeof *y * 256 * COLS);
    for (int i = 0; i < REPEATS; i++) {
        qc_qpk_writer *w = start(path);
        double t0 = now();
        put_tensor(w, &info, &rows, 256);
        pack[i] = now() - t0;
        finish(w);
        qc_source *src = NULL;
        if (qc_qpk_open(path, &src, &err) != QC_OK || qc_qpk_check(src, &err) != QC_OK)
            ck_abort_msg("%s", err.msg);
        t0 = now();
        for (int64_t r = 0; r < ROWS; r += 256)
            if (src->read_rows(src, 0, r, 256, y, &err) != QC_OK)
                ck_abort_msg("%s", err.msg);
        decode[i] = now() - t0;
        qc_source_close(src);
    }
    printf("%d bit, group %4lld, %s: pack %.0f MB/s of codes, decode %.2f GB/s of float32\n", bits,
           (long long)group, symmetric ? "symmetric " : "asymmetric", ROWS * COLS / median(pack) * 1e-6,
           ROWS * COLS * 4.0 / median(decode) * 1e-9);
    free(y);
    free_rows(&rows);
    unlink(path);
    free(path);
}

/* 311 tensors and a large vocabulary table, as in Qwen3-0.6B. */
static void bench_open(void)
{
    char *path = temp_name("bench_open.qpk"), name[64];
    qc_qpk_writer *w = start(path);
    qc_tensor_info info = grid_info("model.embed_tokens.weight", 151936, 1024, 8, 1024, true, QC_DT_F16);
    qc_tensor_info part = info;
    part.shape[0] = 151936;
    qc_code_rows rows = {
        .n_rows = 151936, .codes = calloc(151936, 1024), .scales = calloc(151936, sizeof(float))};
    put_tensor(w, &part, &rows, 4096);
    free_rows(&rows);
    info = grid_info(name, 3072, 1024, 4, 128, true, QC_DT_F16);
    rows = make_rows(&info, 2);
    for (int i = 0; i < 310; i++) {
        snprintf(name, sizeof name, "model.layers.%d.tensor.weight", i);
        put_tensor(w, &info, &rows, 3072);
    }
    finish(w);
    double t[REPEATS];
    float y[1024];
    for (int i = 0; i < REPEATS; i++) {
        double t0 = now();
        qpk_file *file = NULL;
        if (qpk_open(path, &file, NULL, 0) != QPK_OK ||
            qpk_dequantize_rows(file, 0, 777, 1, y, NULL, 0) != QPK_OK)
            ck_abort();
        t[i] = now() - t0;
        qpk_close(file);
    }
    printf("open to first row, 311 tensors: %.2f ms\n", 1e3 * median(t));
    free_rows(&rows);
    unlink(path);
    free(path);
}

START_TEST(speed)
{
    for (int bits = 2; bits <= 8; bits++)
        bench_grid(bits, 128, true);
    bench_grid(4, 128, false);
    bench_grid(4, 32, false);
    bench_grid(4, 16, true);
    bench_grid(8, COLS, true);
    bench_open();
}
END_TEST

int main(void)
{
    return run_tests("qpk_speed", (test_case[]){{"speed", speed}, {NULL, NULL}});
}
