/* The writer under trouble: no memory, no disk, killed, not allowed, called wrongly. Nothing half-written
 * stays. */
#include "qpk_test.h"

#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* A fresh folder; free(). */
static char *new_folder(void)
{
    char *path = temp_name("folder-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(path));
    return path;
}

static char *in_folder(const char *folder, const char *name)
{
    char *path = malloc(4096);
    snprintf(path, 4096, "%s/%s", folder, name);
    return path;
}

static int count_files(const char *folder)
{
    int n = 0;
    DIR *dir = opendir(folder);
    ck_assert_ptr_nonnull(dir);
    for (struct dirent *e; (e = readdir(dir));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(dir);
    return n;
}

static void remove_folder(char *folder)
{
    char command[4200];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    ck_assert_int_eq(system(command), 0);
    free(folder);
}

START_TEST(out_of_memory)
{
    char *folder = new_folder(), *path = in_folder(folder, "x.qpk");
    qc_err err = {0};
    long n = 0;
    for (int rc = QC_E_RESOURCE; rc != QC_OK;) {
        qc_alloc_fail_at(++n);
        rc = try_sample(path, &err);
        qc_alloc_fail_at(0);
        if (rc != QC_OK) {
            ck_assert_msg(rc == QC_E_RESOURCE && strstr(err.msg, "out of memory"), "%ld: %d %s", n, rc,
                          err.msg);
            ck_assert_int_eq(count_files(folder), 0);
        }
    }
    ck_assert_int_gt(n, 20);
    qc_source *src = NULL;
    n = 0;
    for (int rc = QC_E_RESOURCE; rc != QC_OK;) {
        char *text = NULL;
        size_t n_bytes;
        qc_alloc_fail_at(++n);
        rc = qc_qpk_open(path, &src, &err);
        if (rc == QC_OK) {
            rc = src->side_file(src, "config.json", &text, &n_bytes, &err);
            qc_free(text);
            qc_source_close(src);
        }
        qc_alloc_fail_at(0);
        ck_assert(rc == QC_OK || (rc == QC_E_RESOURCE && strstr(err.msg, "out of memory")));
    }
    ck_assert_int_eq(n, 5);
    free(path);
    remove_folder(folder);
}
END_TEST

START_TEST(disk_full)
{
    char *folder = new_folder(), *path = in_folder(folder, "x.qpk");
    qc_err err = {0};
    write_sample(path);
    size_t n_bytes, n_again;
    char *before = slurp(path, &n_bytes);
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit);
    for (size_t size = 0; size < n_bytes; size += size < 256 ? 128 : 1024) {
        limit.rlim_cur = size;
        ck_assert_int_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
        int rc = try_sample(path, &err);
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_FSIZE, &limit);
        ck_assert_msg(rc == QC_E_RESOURCE && strstr(err.msg, "write failed: File too large"), "%zu: %s", size,
                      err.msg);
        ck_assert_int_eq(count_files(folder), 1);
    }
    char *after = slurp(path, &n_again); /* the earlier artifact is untouched */
    ck_assert_uint_eq(n_again, n_bytes);
    ck_assert_mem_eq(before, after, n_bytes);
    qc_free(before);
    qc_free(after);
    free(path);
    remove_folder(folder);
}
END_TEST

/* Child: write the sample up to a stage, then die without any cleaning up. */
static void killed_at(const char *path, int stage)
{
    pid_t pid = fork();
    ck_assert_int_ge(pid, 0);
    if (pid == 0) {
        static uint8_t zeros[4096];
        qc_err err = {0};
        qc_qpk_writer *w = NULL;
        const char *temp;
        qc_tensor_info info = {.name = "w", .dtype = QC_DT_U8, .n_dims = 2, .shape = {64, 64}};
        if (qc_qpk_create(path, true, &w, &err) < 0 || qc_qpk_begin_tensor(w, &info, &err) < 0)
            _exit(1);
        if (stage >= 1 && (qc_qpk_put_dense(w, zeros, 64, &err) < 0 || qc_qpk_end_tensor(w, &err) < 0))
            _exit(1);
        if (stage >= 2 && qc_qpk_finish(w, &temp, &err) < 0)
            _exit(1);
        raise(SIGKILL);
    }
    int status = 0;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

START_TEST(killed)
{
    char *folder = new_folder(), *path = in_folder(folder, "x.qpk");
    for (int stage = 0; stage < 3; stage++) {
        killed_at(path, stage);
        ck_assert(!qc_path_exists(path));
    }
    write_sample(path); /* clears what the dead left behind */
    ck_assert_int_eq(count_files(folder), 1);
    size_t n_bytes, n_again;
    char *before = slurp(path, &n_bytes);
    killed_at(path, 2);
    char *after = slurp(path, &n_again);
    ck_assert_uint_eq(n_again, n_bytes);
    ck_assert_mem_eq(before, after, n_bytes);
    qc_free(before);
    qc_free(after);
    free(path);
    remove_folder(folder);
}
END_TEST

START_TEST(not_allowed)
{
    char *folder = new_folder(), *path = in_folder(folder, "x.qpk"), *other = in_folder(folder, "none/x.qpk");
    qc_err err = {0};
    qc_qpk_writer *w = NULL;
    ck_assert_int_eq(qc_qpk_create(other, false, &w, &err), QC_E_RESOURCE);
    ck_assert_ptr_nonnull(strstr(err.msg, "No such file or directory"));
    ck_assert_int_eq(qc_qpk_create(folder, true, &w, &err), QC_E_USAGE);
    write_sample(path);
    ck_assert_int_eq(qc_qpk_create(path, false, &w, &err), QC_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.msg, "exists already"));
    ck_assert_int_eq(chmod(folder, 0555), 0);
    bool root = geteuid() == 0;
    if (!root || seteuid(65534) == 0) {
        ck_assert_int_eq(qc_qpk_create(path, true, &w, &err), QC_E_RESOURCE);
        ck_assert_ptr_nonnull(strstr(err.msg, "Permission denied"));
        qc_source *src = NULL;
        ck_assert(!root || seteuid(0) == 0);
        ck_assert_int_eq(chmod(path, 0), 0);
        ck_assert(!root || seteuid(65534) == 0);
        ck_assert_int_eq(qc_qpk_open(path, &src, &err), QC_E_INPUT);
        ck_assert_ptr_nonnull(strstr(err.msg, "Permission denied"));
        ck_assert(!root || seteuid(0) == 0);
    }
    chmod(folder, 0755);
    free(path);
    free(other);
    remove_folder(folder);
}
END_TEST

START_TEST(published_elsewhere)
{
    char *folder = new_folder(), *path = in_folder(folder, "x.qpk"),
         *other = in_folder(folder, "x.qpk.rejected");
    qc_err err = {0};
    const char *temp = NULL;
    qc_qpk_writer *w = start(path);
    ck_assert_int_eq(qc_qpk_finish(w, &temp, &err), QC_OK);
    qc_source *src = NULL;
    ck_assert_msg(qc_qpk_open(temp, &src, &err) == QC_OK, "%s", err.msg); /* what verification reads */
    ck_assert_int_eq(src->n_tensors, 0);
    qc_source_close(src);
    ck_assert_int_eq(qc_qpk_add_meta_u64(w, "late", 1, &err), QC_E_USAGE);
    ck_assert_int_eq(qc_qpk_publish(w, other, &err), QC_OK);
    ck_assert(qc_path_exists(other) && !qc_path_exists(path));
    w = start(path);
    ck_assert_int_eq(qc_qpk_publish(w, NULL, &err), QC_E_USAGE); /* not finished: nothing appears */
    w = start(path);
    qc_qpk_discard(w);
    ck_assert_int_eq(count_files(folder), 1);
    free(path);
    free(other);
    remove_folder(folder);
}
END_TEST

/* Expect a failing call with its code and a part of its message. */
#define FAILS(call, expected_code, part)                                                                     \
    do {                                                                                                     \
        err.msg[0] = 0;                                                                                      \
        int got_ = (call);                                                                                   \
        ck_assert_msg(got_ == (expected_code) && strstr(err.msg, (part)), "%s: %d '%s'", #call, got_,        \
                      err.msg);                                                                              \
    } while (0)

START_TEST(wrong_calls)
{
    char *folder = new_folder(), *path = in_folder(folder, "x.qpk");
    qc_err err = {0};
    qc_qpk_writer *w = start(path);
    qc_tensor_info grid = grid_info("w", 20, 64, 4, 32, false, QC_DT_F16);
    qc_tensor_info dense = {.name = "d", .dtype = QC_DT_F16, .n_dims = 1, .shape = {8}};
    qc_code_rows rows = make_rows(&grid, 3), part = rows;
    const char *temp = NULL;
    uint16_t eight[8] = {0};
    FAILS(qc_qpk_put_codes(w, &rows, &err), QC_E_USAGE, "no tensor was begun");
    FAILS(qc_qpk_end_tensor(w, &err), QC_E_USAGE, "no tensor was begun");
    FAILS(qc_qpk_add_alias(w, "a", "w", &err), QC_E_USAGE, "alias 'a': tensor 'w' was not written");
    ck_assert_int_eq(qc_qpk_begin_tensor(w, &grid, &err), QC_OK);
    FAILS(qc_qpk_begin_tensor(w, &dense, &err), QC_E_USAGE, "a tensor is not ended");
    FAILS(qc_qpk_finish(w, &temp, &err), QC_E_USAGE, "a tensor is not ended");
    FAILS(qc_qpk_put_dense(w, eight, 1, &err), QC_E_USAGE, "'w' is on a grid");
    part.n_rows = 15;
    FAILS(qc_qpk_put_codes(w, &part, &err), QC_E_USAGE, "15 rows, expected a multiple of 16");
    part.n_rows = 21;
    FAILS(qc_qpk_put_codes(w, &part, &err), QC_E_USAGE, "'w': 1 rows too many");
    FAILS(qc_qpk_end_tensor(w, &err), QC_E_USAGE, "0 of 20 rows");
    rows.codes[17 * 64 + 63] = 16;
    FAILS(qc_qpk_put_codes(w, &rows, &err), QC_E_INPUT, "'w': a code in rows 16.. does not fit 4 bits");
    rows.codes[17 * 64 + 63] = 15;
    static const float bad_scales[] = {0.1f, 1e6f, 1e-9f, INFINITY, NAN};
    for (size_t i = 0; i < 5; i++) {
        rows.scales[5] = bad_scales[i];
        FAILS(qc_qpk_put_codes(w, &rows, &err), QC_E_INPUT, "of row 2, group 1 is not a F16 value");
    }
    qc_qpk_discard(w);
    rows.scales[5] = 0.5f;

    w = start(path);
    put_tensor(w, &grid, &rows, 32);
    FAILS(qc_qpk_begin_tensor(w, &grid, &err), QC_E_INPUT, "'w' is written twice");
    FAILS(qc_qpk_add_alias(w, "w", "w", &err), QC_E_INPUT, "'w' is written twice");
    dense.name = "";
    FAILS(qc_qpk_begin_tensor(w, &dense, &err), QC_E_INPUT, "a name of 0 bytes");
    dense.name = "a\nb";
    FAILS(qc_qpk_begin_tensor(w, &dense, &err), QC_E_INPUT, "control character");
    dense.name = "f4";
    dense.dtype = QC_DT_F4;
    FAILS(qc_qpk_begin_tensor(w, &dense, &err), QC_E_UNSUPPORTED, "'f4': qpk files can not hold F4");
    dense.dtype = QC_DT_F32;
    dense.shape[0] = -1;
    FAILS(qc_qpk_begin_tensor(w, &dense, &err), QC_E_INPUT, "dimension 0 is -1");
    static const int64_t bad_groups[] = {0, 6, 128, -1};
    for (size_t i = 0; i < 4; i++) {
        qc_tensor_info bad = grid_info("b", 20, 64, 4, bad_groups[i], false, QC_DT_F16);
        FAILS(qc_qpk_begin_tensor(w, &bad, &err), QC_E_INPUT, "tensor 'b': groups of");
        ck_assert_uint_eq(qc_qpk_tensor_bytes(&bad), 0);
    }
    ck_assert_int_eq(qc_qpk_add_file(w, "w", "x", 1, &err), QC_OK); /* names are apart by kind */
    FAILS(qc_qpk_add_file(w, "w", "x", 1, &err), QC_E_INPUT, "'w' is written twice");
    ck_assert_int_eq(qc_qpk_add_meta_u64(w, "w", 1, &err), QC_OK);
    FAILS(qc_qpk_add_meta_f64(w, "w", 1, &err), QC_E_INPUT, "'w' is written twice");
    qc_qpk_discard(w);
    ck_assert_int_eq(count_files(folder), 0);
    free_rows(&rows);
    free(path);
    remove_folder(folder);
}
END_TEST

int main(void)
{
    return run_tests("qpk_writer", (test_case[]){{"out of memory", out_of_memory},
                                                 {"disk full", disk_full},
                                                 {"killed", killed},
                                                 {"not allowed", not_allowed},
                                                 {"published elsewhere", published_elsewhere},
                                                 {"wrong calls", wrong_calls},
                                                 {NULL, NULL}});
}
