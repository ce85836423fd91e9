/* Work journal: what a killed run left behind is either a whole layer or gone, and nothing else can be
 * continued.
 */
#include "journal.h"
#include "qc_blocks.h"
#include "qc_file.h"
#include "qc_rng.h"
#include "qc_test.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

static char path[64];

static const qc_journal_key keys[] = {
    {"tool", "0.1.0"}, {"model.safetensors", "00ff"}, {"recipe.quantize.bits", "4"}, {"calibration", ""}};
#define N_KEYS 4

static void setup(void)
{
    /* in memory if possible: thousands of fsyncs */
    const char *folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(path, sizeof path, "%s/qc-journal-%ld", folder, (long)getpid());
    unlink(path);
}

static void teardown(void)
{
    unlink(path);
}

static qc_journal *open_journal(bool resume, bool force)
{
    qc_err err = {0};
    qc_journal *j = NULL;
    ck_assert_msg(qc_journal_open(path, keys, N_KEYS, resume, force, &j, &err) == QC_OK, "%s", err.msg);
    return j;
}

static void expect_refused(const qc_journal_key *k, int n_keys, bool resume, bool force, int code,
                           const char *text)
{
    qc_err err = {0};
    qc_journal *j = NULL;
    ck_assert_int_eq(qc_journal_open(path, k, n_keys, resume, force, &j, &err), code);
    ck_assert_msg(strstr(err.msg, text) != NULL, "'%s' was expected in: %s", text, err.msg);
    ck_assert_ptr_null(j);
}

/* ---- content that depends on names and numbers only ---- */

enum { ROWS = 5, COLS = 37, GROUP = 8, GROUPS = 5, N_DENSE = 9 };

typedef struct matrix {
    uint8_t codes[ROWS * COLS], zeros[ROWS * GROUPS];
    float scales[ROWS * GROUPS];
    qc_code_rows rows;
} matrix;

static qc_grid grid_of(int bits, bool symmetric)
{
    return (qc_grid){.kind = QC_GRID_AFFINE,
                     .bits = bits,
                     .symmetric = symmetric,
                     .group_elems = GROUP,
                     .scale_dtype = QC_DT_F16};
}

static void fill(matrix *m, const qc_grid *grid, uint64_t seed)
{
    qc_rng rng;
    qc_rng_seed(&rng, seed);
    for (int i = 0; i < ROWS * COLS; i++)
        m->codes[i] = (uint8_t)qc_rng_below(&rng, 1u << grid->bits);
    for (int i = 0; i < ROWS * GROUPS; i++) {
        m->scales[i] = i == 3 ? -0.0f : (float)qc_rng_normal(&rng);
        m->zeros[i] = (uint8_t)qc_rng_below(&rng, 1u << grid->bits);
    }
    m->rows = (qc_code_rows){
        .n_rows = ROWS, .codes = m->codes, .scales = m->scales, .zeros = grid->symmetric ? NULL : m->zeros};
}

/* Layer n: one matrix for each width of codes, symmetric in odd layers, a vector and a text. */
static int put_layer(qc_journal *j, int n, qc_err *err)
{
    QC_TRY(qc_journal_begin_layer(j, n, err));
    char name[32];
    for (int bits = 2; bits <= 8; bits++) {
        matrix m;
        qc_grid grid = grid_of(bits, n % 2);
        fill(&m, &grid, (uint64_t)(n * 10 + bits));
        snprintf(name, sizeof name, "layers.%d.w%d", n, bits);
        QC_TRY(qc_journal_put_codes(j, name, &grid, COLS, &m.rows, err));
    }
    float dense[N_DENSE];
    for (int i = 0; i < N_DENSE; i++)
        dense[i] = (float)(n + 1) / (float)(i + 1);
    snprintf(name, sizeof name, "layers.%d.norm", n);
    QC_TRY(qc_journal_put_dense(j, name, dense, N_DENSE, err));
    snprintf(name, sizeof name, "layer.%d", n);
    QC_TRY(qc_journal_put_text(j, name, n ? "{\"error\": 0.25}" : "", err));
    return qc_journal_end_layer(j, err);
}

static void write_layers(qc_journal *j, int from, int to)
{
    qc_err err = {0};
    for (int n = from; n < to; n++)
        ck_assert_msg(put_layer(j, n, &err) == QC_OK, "%s", err.msg);
}

static void expect_codes(const qc_journal *j, int n, int bits, int64_t row0, int64_t n_rows)
{
    char name[32];
    matrix want, got;
    qc_grid grid = grid_of(bits, n % 2);
    fill(&want, &grid, (uint64_t)(n * 10 + bits));
    memset(&got, 0xAA, sizeof got);
    got.rows =
        (qc_code_rows){.codes = got.codes, .scales = got.scales, .zeros = grid.symmetric ? NULL : got.zeros};
    snprintf(name, sizeof name, "layers.%d.w%d", n, bits);
    qc_err err = {0};
    ck_assert_msg(qc_journal_read_codes(j, name, &grid, COLS, row0, n_rows, &got.rows, &err) == QC_OK, "%s",
                  err.msg);
    ck_assert_int_eq(got.rows.n_rows, n_rows);
    ck_assert_mem_eq(got.codes, want.codes + row0 * COLS, (size_t)(n_rows * COLS));
    ck_assert_mem_eq(got.scales, want.scales + row0 * GROUPS, (size_t)(n_rows * GROUPS) * sizeof(float));
    if (!grid.symmetric)
        ck_assert_mem_eq(got.zeros, want.zeros + row0 * GROUPS, (size_t)(n_rows * GROUPS));
}

static void expect_layers(const qc_journal *j, int n_layers)
{
    ck_assert_int_eq(qc_journal_n_layers(j), n_layers);
    char name[32];
    for (int n = 0; n < n_layers; n++) {
        for (int bits = 2; bits <= 8; bits++) {
            expect_codes(j, n, bits, 0, ROWS);
            expect_codes(j, n, bits, 2, 2);
        }
        float dense[N_DENSE];
        snprintf(name, sizeof name, "layers.%d.norm", n);
        ck_assert_int_eq(qc_journal_read_dense(j, name, dense, N_DENSE, NULL), QC_OK);
        ck_assert(dense[2] == (float)(n + 1) / 3.0f);
        char *text;
        snprintf(name, sizeof name, "layer.%d", n);
        ck_assert_int_eq(qc_journal_read_text(j, name, &text, NULL), QC_OK);
        ck_assert_str_eq(text, n ? "{\"error\": 0.25}" : "");
        free(text);
    }
    snprintf(name, sizeof name, "layers.%d.norm", n_layers);
    ck_assert(!qc_journal_has(j, name));
}

static void slurp(char **text, size_t *n)
{
    ck_assert_int_eq(qc_file_read(path, 1u << 24, text, n, NULL), QC_OK);
}

static void spill(const char *text, size_t n)
{
    FILE *f = fopen(path, "wb");
    ck_assert_uint_eq(fwrite(text, 1, n, f), n);
    fclose(f);
}

/* ---- tests ---- */

START_TEST(test_round_trip)
{
    setup();
    qc_journal *j = open_journal(false, false);
    expect_layers(j, 0);
    write_layers(j, 0, 3);
    expect_layers(j, 3);
    qc_journal_close(j);
    j = open_journal(true, false);
    expect_layers(j, 3);
    write_layers(j, 3, 5);
    expect_layers(j, 5);
    qc_journal_close(j);
    expect_refused(keys, N_KEYS, false, false, QC_E_USAGE, "--resume continues it, --force starts anew");
    j = open_journal(false, true);
    expect_layers(j, 0);
    qc_journal_remove(j);
    ck_assert(!qc_path_exists(path));
    j = open_journal(true, false); /* nothing to continue: starts */
    expect_layers(j, 0);
    qc_journal_remove(j);
    qc_journal_remove(NULL);
}
END_TEST

/* Interrupted at any byte and continued, the file has the bytes of one that was not. */
START_TEST(test_cut_anywhere)
{
    setup();
    qc_journal *j = open_journal(false, false);
    write_layers(j, 0, 2);
    qc_journal_close(j);
    char *whole, *again;
    size_t n, n_again, first = 0;
    slurp(&whole, &n);
    for (size_t cut = 0; cut <= n; cut++) {
        spill(whole, cut);
        j = open_journal(true, false);
        int64_t n_layers = qc_journal_n_layers(j);
        if (n_layers == 1 && !first)
            first = cut;
        ck_assert_int_eq(n_layers, cut == n ? 2 : first ? 1 : 0);
        if (cut % 101 && cut != first) { /* an fsync takes its time */
            expect_layers(j, (int)n_layers);
            qc_journal_close(j);
            continue;
        }
        write_layers(j, (int)n_layers, 2);
        expect_layers(j, 2);
        qc_journal_close(j);
        slurp(&again, &n_again);
        ck_assert_uint_eq(n_again, n);
        ck_assert_mem_eq(again, whole, n);
        free(again);
    }
    ck_assert_uint_gt(first, 0);
    free(whole);
    teardown();
}
END_TEST

/* A changed bit anywhere: refused, or the layer and what follows is done again; never a wrong layer. */
START_TEST(test_flip_anywhere)
{
    setup();
    qc_journal *j = open_journal(false, false);
    write_layers(j, 0, 2);
    qc_journal_close(j);
    char *whole;
    size_t n;
    slurp(&whole, &n);
    for (size_t at = 0; at < n; at++) {
        whole[at] ^= (char)(1 << at % 8);
        spill(whole, n);
        whole[at] ^= (char)(1 << at % 8);
        qc_err err = {0};
        int rc = qc_journal_open(path, keys, N_KEYS, true, false, &j, &err);
        ck_assert_int_eq(rc, at < 8 ? QC_E_USAGE : QC_OK);
        if (rc < 0)
            continue;
        ck_assert_int_lt(qc_journal_n_layers(j), 2);
        expect_layers(j, (int)qc_journal_n_layers(j));
        qc_journal_close(j);
    }
    free(whole);
    teardown();
}
END_TEST

START_TEST(test_other_keys)
{
    setup();
    qc_journal *j = open_journal(false, false);
    write_layers(j, 0, 1);
    qc_journal_close(j);
    qc_journal_key other[N_KEYS + 1];
    memcpy(other, keys, sizeof keys);
    other[4] = (qc_journal_key){"more", "x"};
    expect_refused(other, 5, true, false, QC_E_INPUT, "more was not set and is x now");
    expect_refused(keys, 3, true, false, QC_E_INPUT, "calibration was  and is not set now");
    other[2].value = "3";
    expect_refused(other, N_KEYS, true, true, QC_E_INPUT, "recipe.quantize.bits was 4 and is 3 now");
    other[2] = (qc_journal_key){"recipe.quantize.group", "4"};
    expect_refused(other, N_KEYS, true, false, QC_E_INPUT, "recipe.quantize.bits was 4 and is not set now");
    memcpy(other, keys, sizeof keys); /* a list that got longer in the middle */
    other[4] = other[3];
    other[3] = (qc_journal_key){"skip[0]", "*"};
    expect_refused(other, 5, true, false, QC_E_INPUT, "skip[0] was not set and is * now");
    j = open_journal(true, false); /* the refused ones left it alone */
    expect_layers(j, 1);
    qc_journal_close(j);
    teardown();
}
END_TEST

START_TEST(test_two_writers)
{
    setup();
    qc_journal *j = open_journal(false, false);
    expect_refused(keys, N_KEYS, true, false, QC_E_RESOURCE, "another process writes this output");
    expect_refused(keys, N_KEYS, false, true, QC_E_RESOURCE, "another process writes this output");
    qc_journal_close(j);
    j = open_journal(true, false);
    qc_journal_remove(j);
}
END_TEST

START_TEST(test_not_a_journal)
{
    setup();
    spill("dear diary\n", 11);
    expect_refused(keys, N_KEYS, true, false, QC_E_USAGE, "is not a journal of qconvert");
    expect_refused(keys, N_KEYS, false, true, QC_E_USAGE, "is not a journal of qconvert");
    char *text;
    size_t n;
    slurp(&text, &n);
    ck_assert_str_eq(text, "dear diary\n");
    free(text);
    teardown();
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    expect_refused(keys, N_KEYS, true, false, QC_E_USAGE, "is not a regular file");
    teardown();
    ck_assert_int_eq(symlink("/dev/null", path), 0);
    expect_refused(keys, N_KEYS, true, false, QC_E_RESOURCE, "can not open");
    teardown();
    snprintf(path, sizeof path, "/tmp/qc-no-such-folder/j");
    expect_refused(keys, N_KEYS, true, false, QC_E_RESOURCE, "can not open");
}
END_TEST

/* The disk is full in the third layer: one line, two layers stay, the rest follows when there is room. */
START_TEST(test_disk_full)
{
    setup();
    signal(SIGXFSZ, SIG_IGN);
    qc_journal *j = open_journal(false, false);
    write_layers(j, 0, 2);
    struct stat st;
    ck_assert_int_eq(stat(path, &st), 0);
    struct rlimit old, limit;
    getrlimit(RLIMIT_FSIZE, &old);
    limit = old;
    limit.rlim_cur = (rlim_t)st.st_size + 700;
    setrlimit(RLIMIT_FSIZE, &limit);
    qc_err err = {0};
    ck_assert_int_eq(put_layer(j, 2, &err), QC_E_RESOURCE);
    ck_assert_msg(strstr(err.msg, "write failed") != NULL, "%s", err.msg);
    setrlimit(RLIMIT_FSIZE, &old);
    struct stat after;
    ck_assert_int_eq(stat(path, &after), 0);
    ck_assert_int_eq(after.st_size, st.st_size);
    expect_layers(j, 2);
    ck_assert_int_lt(qc_journal_begin_layer(j, 2, &err), 0); /* this run is over */
    qc_journal_close(j);
    j = open_journal(true, false);
    write_layers(j, 2, 3);
    expect_layers(j, 3);
    qc_journal_remove(j);
}
END_TEST

/* Killed without warning while it writes. */
START_TEST(test_killed)
{
    setup();
    for (int round = 0; round < 8; round++) {
        pid_t child = fork();
        if (child == 0) {
            qc_journal *j = open_journal(true, false);
            for (int n = (int)qc_journal_n_layers(j); n < 1000; n++)
                if (put_layer(j, n, NULL) < 0)
                    _exit(1);
            _exit(0);
        }
        usleep((useconds_t)(4000 + 2700 * round));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        qc_journal *j = open_journal(true, false);
        expect_layers(j, (int)qc_journal_n_layers(j));
        qc_journal_close(j);
    }
    teardown();
}
END_TEST

START_TEST(test_misuse)
{
    setup();
    qc_err err = {0};
    qc_journal *j = open_journal(false, false);
    write_layers(j, 0, 1);
    float x[N_DENSE] = {0};
    matrix m;
    qc_grid grid = grid_of(4, false);
    fill(&m, &grid, 1);
    m.rows.zeros = m.zeros;
    char *text;
    ck_assert_int_eq(qc_journal_read_dense(j, "layers.0.norm", x, N_DENSE - 1, &err), QC_E_INPUT);
    ck_assert_int_eq(qc_journal_read_dense(j, "layers.0.w4", x, N_DENSE, &err), QC_E_INPUT);
    ck_assert_int_eq(qc_journal_read_text(j, "layers.0.norm", &text, &err), QC_E_INPUT);
    ck_assert_int_eq(qc_journal_read_codes(j, "layers.0.w4", &grid, COLS - 1, 0, ROWS, &m.rows, &err),
                     QC_E_INPUT);
    ck_assert_int_eq(qc_journal_read_codes(j, "layers.0.w4", &grid, COLS, 1, ROWS, &m.rows, &err),
                     QC_E_INPUT);
    ck_assert_int_eq(qc_journal_read_codes(j, "layers.0.w4", &grid, COLS, -1, 1, &m.rows, &err), QC_E_INPUT);
    qc_grid other[] = {grid_of(3, false), grid_of(4, true), grid, grid};
    other[2].group_elems = GROUP / 2;
    other[3].scale_dtype = QC_DT_BF16;
    for (int i = 0; i < 4; i++)
        ck_assert_int_eq(qc_journal_read_codes(j, "layers.0.w4", &other[i], COLS, 0, 1, &m.rows, &err),
                         QC_E_INPUT);
    ck_assert_int_eq(qc_journal_read_codes(j, "nowhere", &grid, COLS, 0, 1, &m.rows, &err), QC_E_INPUT);
    ck_assert_msg(strstr(err.msg, "holds no codes of nowhere") != NULL, "%s", err.msg);
    ck_assert_int_eq(qc_journal_begin_layer(j, 2, &err), QC_E_INPUT);
    qc_journal_close(j);
    j = open_journal(true, false);
    ck_assert_int_eq(qc_journal_begin_layer(j, 1, &err), QC_OK);
    ck_assert_int_eq(qc_journal_put_dense(j, "a", x, 1, &err), QC_OK);
    ck_assert(!qc_journal_has(j, "a")); /* not before the layer is whole */
    ck_assert_int_eq(qc_journal_put_dense(j, "a", x, 1, &err), QC_E_INPUT);
    ck_assert_int_lt(qc_journal_end_layer(j, &err), 0);
    expect_layers(j, 1);
    qc_journal_remove(j);
}
END_TEST

/* Grids with minima and super-blocks: blocks of llama.cpp's library go in as codes and come out as the same
 * bytes, the whole and a row of it. */
START_TEST(test_block_grids)
{
    setup();
    char *data;
    size_t n_bytes;
    int n_types = 0;
    qc_err err = {0};
    ck_assert_int_eq(qc_file_read(test_data("gguf/blocks.bin"), 1u << 20, &data, &n_bytes, NULL), QC_OK);
    qc_journal *j = open_journal(false, false);
    ck_assert_int_eq(qc_journal_begin_layer(j, 0, &err), QC_OK);
    for (int turn = 0; turn < 2; turn++) {
        for (size_t at = 0; at < n_bytes;) {
            uint32_t head[5]; /* kind, type, blocks, values and bytes of a block */
            memcpy(head, data + at, sizeof head);
            const qc_block_info *type = qc_block_find(head[1]);
            const uint8_t *blocks = (const uint8_t *)data + at + sizeof head;
            at += sizeof head + (size_t)head[2] * (head[4] + 4 * head[3]);
            if (head[0] != 0)
                continue;
            int64_t cols = (int64_t)head[2] / 2 * head[3];
            size_t row_bytes = (size_t)head[2] / 2 * head[4];
            qc_code_rows rows;
            ck_assert_int_eq(qc_code_rows_alloc(&type->grid, 2, cols, &rows, NULL), QC_OK);
            if (turn == 0) {
                qc_block_unpack(type, blocks, 2, cols, &rows);
                ck_assert_msg(qc_journal_put_codes(j, type->name, &type->grid, cols, &rows, &err) == QC_OK,
                              "%s", err.msg);
            } else {
                uint8_t *packed = malloc(2 * row_bytes);
                for (int64_t row = 0; row < 2; row++) { /* both rows, then the second */
                    ck_assert_msg(qc_journal_read_codes(j, type->name, &type->grid, cols, row, 2 - row, &rows,
                                                        &err) == QC_OK,
                                  "%s", err.msg);
                    qc_block_pack(type, &rows, cols, packed);
                    ck_assert_msg(
                        memcmp(packed, blocks + (size_t)row * row_bytes, (size_t)(2 - row) * row_bytes) == 0,
                        "%s", type->name);
                }
                free(packed);
                n_types++;
            }
            qc_code_rows_free(&rows);
        }
        if (turn == 0)
            ck_assert_int_eq(qc_journal_end_layer(j, &err), QC_OK);
        if (turn == 0) {
            qc_journal_close(j);
            j = open_journal(true, false);
        }
    }
    ck_assert_int_eq(n_types, 8);
    qc_journal_remove(j);
    free(data);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"block grids", test_block_grids},
        {"round trip", test_round_trip},
        {"cut anywhere", test_cut_anywhere},
        {"flip anywhere", test_flip_anywhere},
        {"other keys", test_other_keys},
        {"two writers", test_two_writers},
        {"not a journal", test_not_a_journal},
        {"disk full", test_disk_full},
        {"killed", test_killed},
        {"misuse", test_misuse},
        {NULL, NULL},
    };
    return run_tests("journal", cases);
}
