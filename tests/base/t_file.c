/* Files: outputs appear whole or not at all, whatever happens in between; reading refuses what would hang or
 * crash. */
#include "qc_alloc.h"
#include "qc_file.h"

#include "qc_test.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[64];

static void setup(void)
{
    snprintf(folder, sizeof folder, "/tmp/qc-file-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
}

static const char *in_folder(const char *name)
{
    static char path[4][128];
    static int turn;
    char *p = path[turn++ & 3];
    snprintf(p, sizeof path[0], "%s/%s", folder, name);
    return p;
}

/* Names in the folder, dot names included. */
static int n_files(void)
{
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e; (e = readdir(d));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(d);
    return n;
}

static void teardown(void)
{
    DIR *d = opendir(folder);
    for (struct dirent *e; (e = readdir(d));)
        unlinkat(dirfd(d), e->d_name, 0);
    closedir(d);
    ck_assert_int_eq(rmdir(folder), 0);
}

static void expect_content(const char *path, const char *want)
{
    char *text;
    size_t n;
    ck_assert_int_eq(qc_file_read(path, 1000, &text, &n, NULL), QC_OK);
    ck_assert_str_eq(text, want);
    qc_free(text);
}

START_TEST(whole_or_not_at_all)
{
    setup();
    qc_outfile *out;
    qc_err err;
    const char *path = in_folder("a");
    ck_assert_int_eq(qc_outfile_open(path, false, &out, &err), QC_OK);
    ck_assert_int_eq(qc_outfile_write(out, "one ", 4, &err), QC_OK);
    ck_assert_int_eq(qc_outfile_write(out, "two", 3, &err), QC_OK);
    ck_assert_int_eq(qc_outfile_pwrite(out, "ONE", 3, 0, &err), QC_OK);
    ck_assert_uint_eq(qc_outfile_offset(out), 7);
    ck_assert(!qc_path_exists(path));
    ck_assert(qc_path_exists(qc_outfile_temp_path(out)));
    ck_assert_int_eq(qc_outfile_commit(out, NULL, &err), QC_OK);
    expect_content(path, "ONE two");
    ck_assert_int_eq(n_files(), 1);

    ck_assert_int_eq(qc_outfile_open(path, false, &out, &err), QC_E_USAGE);
    ck_assert_int_eq(qc_outfile_open(path, true, &out, &err), QC_OK);
    ck_assert_int_eq(qc_outfile_write(out, "new", 3, &err), QC_OK);
    qc_outfile_discard(out);
    expect_content(path, "ONE two");
    ck_assert_int_eq(qc_file_write(path, true, "new", 3, &err), QC_OK);
    expect_content(path, "new");
    ck_assert_int_eq(n_files(), 1);
    qc_outfile_discard(NULL);
    teardown();
}
END_TEST

START_TEST(other_name_and_late_arrivals)
{
    setup();
    qc_outfile *out;
    qc_err err;
    const char *path = in_folder("a"), *rejected = in_folder("a.rejected");
    for (int i = 0; i < 2; i++) { /* the second time replaces the first's */
        ck_assert_int_eq(qc_outfile_open(path, false, &out, &err), QC_OK);
        ck_assert_int_eq(qc_outfile_commit(out, rejected, &err), QC_OK);
        ck_assert(qc_path_exists(rejected) && !qc_path_exists(path));
    }
    /* somebody else's file appears under the name during the run */
    ck_assert_int_eq(qc_outfile_open(path, false, &out, &err), QC_OK);
    int fd = open(path, O_CREAT | O_WRONLY, 0600);
    ck_assert_int_eq(write(fd, "theirs", 6), 6);
    close(fd);
    ck_assert_int_eq(qc_outfile_commit(out, NULL, &err), QC_E_USAGE);
    expect_content(path, "theirs");
    ck_assert_int_eq(n_files(), 2);
    teardown();
}
END_TEST

START_TEST(names_that_are_no_file)
{
    setup();
    qc_outfile *out = NULL;
    qc_err err;
    ck_assert_int_eq(qc_outfile_open(folder, true, &out, &err), QC_E_USAGE);
    ck_assert_int_eq(qc_outfile_open("", true, &out, &err), QC_E_USAGE);
    ck_assert_int_eq(qc_outfile_open(in_folder("new/"), true, &out, &err), QC_E_USAGE);
    ck_assert_int_eq(qc_outfile_open(in_folder("no/such/x"), true, &out, &err), QC_E_RESOURCE);
    ck_assert_ptr_nonnull(strstr(err.msg, "No such file"));
    symlink("nowhere", in_folder("dangling"));
    ck_assert_int_eq(qc_outfile_open(in_folder("dangling"), false, &out, &err), QC_E_USAGE);
    ck_assert_int_eq(mkfifo(in_folder("pipe"), 0600), 0);
    ck_assert_int_eq(qc_outfile_open(in_folder("pipe"), true, &out, &err), QC_E_USAGE);
    symlink("/dev/zero", in_folder("device"));
    ck_assert_int_eq(qc_outfile_open(in_folder("device"), true, &out, &err), QC_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.msg, "device"));
    ck_assert_ptr_null(out);
    teardown();
}
END_TEST

START_TEST(names_in_all_spellings)
{
    setup();
    mkdir(in_folder("sub"), 0700);
    ck_assert(qc_path_same_entry(in_folder("x"), in_folder("./x")));
    ck_assert(qc_path_same_entry(in_folder("sub/../x"), in_folder("x")));
    ck_assert(!qc_path_same_entry(in_folder("sub/x"), in_folder("x")));
    ck_assert(!qc_path_same_entry(in_folder("y"), in_folder("x")));
    ck_assert(qc_path_same_entry("no/such", "no/such") && qc_path_same_entry("x", "./x"));
    rmdir(in_folder("sub"));
    teardown();
}
END_TEST

START_TEST(unwritable_folder)
{
    if (geteuid() == 0) { /* root may write anywhere: become nobody in a child of our own */
        setup();
        chmod(folder, 0555);
        pid_t pid = fork();
        if (pid == 0) {
            qc_outfile *out;
            qc_err err;
            if (setgid(65534) != 0 || setuid(65534) != 0)
                _exit(9);
            _exit(qc_outfile_open(in_folder("x"), false, &out, &err) == QC_E_RESOURCE ? 0 : 1);
        }
        int status;
        waitpid(pid, &status, 0);
        ck_assert_int_eq(status, 0);
        teardown();
        return;
    }
    setup();
    chmod(folder, 0555);
    qc_outfile *out;
    ck_assert_int_eq(qc_outfile_open(in_folder("x"), false, &out, NULL), QC_E_RESOURCE);
    chmod(folder, 0755);
    teardown();
}
END_TEST

/* A full disk looks the same as the limit on a file's size: a short write, then an error. */
START_TEST(no_room)
{
    setup();
    qc_err err;
    qc_signals_install(); /* SIGXFSZ would end us otherwise */
    struct rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &limit);
    static char block[300000];
    qc_outfile *out;
    ck_assert_int_eq(qc_outfile_open(in_folder("big"), false, &out, &err), QC_OK);
    int rc = QC_OK;
    for (int i = 0; i < 8 && rc == QC_OK; i++)
        rc = qc_outfile_write(out, block, sizeof block, &err);
    ck_assert_int_eq(rc, QC_E_RESOURCE);
    ck_assert_ptr_nonnull(strstr(err.msg, "write failed"));
    qc_outfile_discard(out);
    ck_assert_int_eq(qc_file_write(in_folder("big"), false, block, sizeof block, &err), QC_OK);
    ck_assert_int_eq(n_files(), 1);
    teardown();
}
END_TEST

/* kill -9 at 20 moments of a loop that replaces one file by versions of itself: the file is always one whole
 * version, and the next run removes what the killed one left. */
static void write_versions(const char *path)
{
    static char text[200000];
    for (int version = 0;; version++) {
        qc_outfile *out;
        qc_err err;
        memset(text, 'a' + version % 26, sizeof text);
        if (qc_outfile_open(path, true, &out, &err) < 0)
            _exit(1);
        for (size_t i = 0; i < sizeof text; i += 5000)
            if (qc_outfile_write(out, text + i, 5000, &err) < 0)
                _exit(2);
        if (qc_outfile_commit(out, NULL, &err) < 0)
            _exit(3);
    }
}

START_TEST(killed_at_any_moment)
{
    setup();
    const char *path = in_folder("v");
    int n_left = 0;
    for (int round = 0; round < 20; round++) {
        pid_t pid = fork();
        if (pid == 0)
            write_versions(path);
        usleep((useconds_t)(3000 + round * 1700));
        kill(pid, SIGKILL);
        int status;
        waitpid(pid, &status, 0);
        ck_assert(WIFSIGNALED(status));
        n_left += n_files() > qc_path_exists(path);
        char *text;
        size_t n = 0;
        if (!qc_path_exists(path))
            continue;
        ck_assert_int_eq(qc_file_read(path, 1 << 20, &text, &n, NULL), QC_OK);
        ck_assert_uint_eq(n, 200000);
        ck_assert_int_eq(text[0], text[n - 1]);
        qc_free(text);
    }
    ck_assert_int_gt(n_left, 0); /* some kills came while a file was being written */
    ck_assert_int_eq(qc_file_write(path, true, "end", 3, NULL), QC_OK);
    ck_assert_int_eq(n_files(), 1);
    teardown();
}
END_TEST

/* A writer at work is not taken for a dead one, and files with other names are left alone. */
START_TEST(stale_files)
{
    setup();
    qc_err err;
    const char *names[] = {".a.tmp-1", ".a.tmp-99999999", ".a.tmp-", ".a.tmp-12x", ".ab.tmp-5", "a.tmp-5"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        close(open(in_folder(names[i]), O_CREAT | O_WRONLY, 0600));
    int fds[2];
    ck_assert_int_eq(pipe(fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        qc_outfile *out;
        if (qc_outfile_open(in_folder("a"), false, &out, &err) < 0 || write(fds[1], "r", 1) != 1)
            _exit(1);
        pause();
    }
    char ready;
    ck_assert_int_eq(read(fds[0], &ready, 1), 1);
    ck_assert_int_eq(n_files(), 5); /* the first two are gone, the child's has come */
    qc_outfile *out, *twice;
    ck_assert_int_eq(qc_outfile_open(in_folder("a"), false, &out, &err), QC_OK);
    ck_assert_int_eq(n_files(), 6);
    ck_assert_int_eq(qc_outfile_open(in_folder("a"), false, &twice, &err), QC_E_RESOURCE);
    ck_assert_ptr_nonnull(strstr(err.msg, "being written already"));
    qc_outfile_discard(out);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    ck_assert_int_eq(qc_file_write(in_folder("a"), false, "x", 1, &err), QC_OK);
    ck_assert_int_eq(n_files(), 5);
    teardown();
}
END_TEST

START_TEST(signals)
{
    setup();
    for (int n_signals = 1; n_signals <= 2; n_signals++) {
        int fds[2], status;
        ck_assert_int_eq(pipe(fds), 0);
        pid_t pid = fork();
        if (pid == 0) {
            qc_outfile *out;
            qc_signals_install();
            if (qc_outfile_open(in_folder("s"), false, &out, NULL) < 0)
                _exit(1);
            for (;;) {
                bool stop = qc_check_interrupt(NULL) == QC_E_INTERRUPTED;
                if (write(fds[1], stop ? "i" : "r", 1) != 1)
                    _exit(2);
                if (stop && n_signals == 1) {
                    qc_outfile_discard(out);
                    _exit(42);
                }
                usleep(2000);
            }
        }
        char c;
        ck_assert_int_eq(read(fds[0], &c, 1), 1);
        kill(pid, SIGTERM);
        do
            ck_assert_int_eq(read(fds[0], &c, 1), 1);
        while (c != 'i');
        if (n_signals == 2)
            kill(pid, SIGINT);
        waitpid(pid, &status, 0);
        ck_assert_int_eq(WEXITSTATUS(status), n_signals == 1 ? 42 : 130);
        ck_assert_int_eq(n_files(), 0);
        close(fds[0]);
        close(fds[1]);
    }
    teardown();
}
END_TEST

START_TEST(an_input_that_shrinks_is_no_crash)
{
    setup();
    static char block[8192];
    ck_assert_int_eq(qc_file_write(in_folder("m"), false, block, sizeof block, NULL), QC_OK);
    pid_t pid = fork();
    if (pid == 0) {
        qc_signals_install();
        (void)!freopen("/dev/null", "w", stderr);
        qc_mapped map;
        if (qc_file_map(in_folder("m"), &map, NULL) < 0 || truncate(in_folder("m"), 10) != 0)
            _exit(1);
        volatile uint8_t last = map.data[8191];
        _exit(last ? 8 : 9);
    }
    int status;
    waitpid(pid, &status, 0);
    ck_assert(WIFEXITED(status));
    ck_assert_int_eq(WEXITSTATUS(status), 3);
    teardown();
}
END_TEST

START_TEST(reading)
{
    setup();
    qc_err err;
    qc_mapped map;
    char *text = NULL;
    size_t n;
    ck_assert_int_eq(qc_file_write(in_folder("f"), false, "hello", 5, &err), QC_OK);
    ck_assert_int_eq(qc_file_write(in_folder("empty"), false, NULL, 0, &err), QC_OK);
    ck_assert_int_eq(qc_file_map(in_folder("f"), &map, &err), QC_OK);
    ck_assert(map.n_bytes == 5 && memcmp(map.data, "hello", 5) == 0);
    qc_mapped_release(&map, 0, 5);
    ck_assert_int_eq(map.data[4], 'o');
    qc_file_unmap(&map);
    qc_file_unmap(NULL);
    ck_assert_int_eq(qc_file_map(in_folder("empty"), &map, &err), QC_OK);
    ck_assert(map.n_bytes == 0 && map.data == NULL);
    qc_mapped_release(&map, 0, 0);
    qc_file_unmap(&map);
    ck_assert_int_eq(qc_file_read(in_folder("f"), 4, &text, &n, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "limit is 4"));
    ck_assert_int_eq(mkfifo(in_folder("fifo"), 0600), 0);
    const char *bad[] = {"fifo", "absent", "."};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ck_assert_int_eq(qc_file_map(in_folder(bad[i]), &map, &err), QC_E_INPUT);
        ck_assert_int_eq(qc_file_read(in_folder(bad[i]), 100, &text, &n, &err), QC_E_INPUT);
    }
    ck_assert_ptr_null(text);
    teardown();
}
END_TEST

START_TEST(paths)
{
    setup();
    const char *dirs[][2] = {{"a", "."},         {"/a", "/"},  {"x/a", "x"},
                             {"/x/y/a", "/x/y"}, {"./a", "."}, {"a/", "a"}};
    for (size_t i = 0; i < sizeof dirs / sizeof dirs[0]; i++) {
        char *dir = qc_path_dir(dirs[i][0]);
        ck_assert_str_eq(dir, dirs[i][1]);
        qc_free(dir);
    }
    const char *joins[][3] = {
        {"a", "b", "a/b"}, {"a/", "b", "a/b"}, {"", "b", "b"}, {"a", "/b", "/b"}, {"/", "b", "/b"}};
    for (size_t i = 0; i < sizeof joins / sizeof joins[0]; i++) {
        char *path = qc_path_join(joins[i][0], joins[i][1]);
        ck_assert_str_eq(path, joins[i][2]);
        qc_free(path);
    }
    ck_assert_int_eq(qc_file_write(in_folder("f"), false, "x", 1, NULL), QC_OK);
    ck_assert_int_eq(link(in_folder("f"), in_folder("hard")), 0);
    ck_assert_int_eq(symlink("f", in_folder("soft")), 0);
    ck_assert(qc_path_same(in_folder("f"), in_folder("./f")));
    ck_assert(qc_path_same(in_folder("f"), in_folder("hard")));
    ck_assert(qc_path_same(in_folder("f"), in_folder("soft")));
    ck_assert(!qc_path_same(in_folder("f"), folder) && !qc_path_same(in_folder("f"), in_folder("absent")));
    ck_assert(qc_path_is_dir(folder) && !qc_path_is_dir(in_folder("f")));
    ck_assert_uint_gt(qc_disk_free_bytes(folder), 0);
    int fd;
    ck_assert_int_eq(qc_scratch_open(folder, &fd, NULL), QC_OK);
    ck_assert_int_eq(pwrite(fd, "x", 1, 1 << 20), 1);
    ck_assert_int_eq(n_files(), 3); /* a scratch file has no name */
    close(fd);
    ck_assert_int_eq(qc_scratch_open(in_folder("absent"), &fd, NULL), QC_E_RESOURCE);
    teardown();
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"whole_or_not_at_all", whole_or_not_at_all},
        {"other_name_and_late_arrivals", other_name_and_late_arrivals},
        {"names_that_are_no_file", names_that_are_no_file},
        {"names_in_all_spellings", names_in_all_spellings},
        {"unwritable_folder", unwritable_folder},
        {"no_room", no_room},
        {"killed_at_any_moment", killed_at_any_moment},
        {"stale_files", stale_files},
        {"signals", signals},
        {"an_input_that_shrinks_is_no_crash", an_input_that_shrinks_is_no_crash},
        {"reading", reading},
        {"paths", paths},
        {0},
    };
    return run_tests("file", cases);
}
