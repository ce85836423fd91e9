/* Folders as outputs: they appear whole or not at all, and --force replaces models, nothing else. */
#include "qc_alloc.h"
#include "qc_outfolder.h"

#include "qc_test.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[64];
static qc_err err;

static void setup(void)
{
    snprintf(folder, sizeof folder, "/tmp/qc-outf-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    ck_assert_int_eq(chdir(folder), 0);
}

static void teardown(void)
{
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", folder);
    ck_assert_int_eq(system(command), 0);
}

static qc_outfolder *start(const char *name, bool force, const char *config)
{
    qc_outfolder *out = NULL;
    ck_assert_msg(qc_outfolder_open(name, force, &out, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_outfolder_write(out, "config.json", config, strlen(config), &err) == QC_OK, "%s",
                  err.msg);
    return out;
}

static void expect(const char *path, const char *want)
{
    char *text;
    size_t n;
    ck_assert_msg(qc_file_read(path, 1000, &text, &n, &err) == QC_OK, "%s", err.msg);
    ck_assert_str_eq(text, want);
    qc_free(text);
}

/* Entries of the test's folder, dot names included. */
static int n_entries(void)
{
    FILE *p = popen("ls -A | wc -l", "r");
    int n = -1;
    ck_assert_int_eq(fscanf(p, "%d", &n), 1);
    pclose(p);
    return n;
}

START_TEST(appears_when_committed)
{
    setup();
    qc_outfolder *out = start("m", false, "{}");
    ck_assert(!qc_path_exists("m"));
    ck_assert_int_eq(qc_outfolder_commit(out, NULL, &err), QC_OK);
    expect("m/config.json", "{}");
    qc_outfolder_discard(start("n", false, "{}"));
    ck_assert_int_eq(n_entries(), 1);
    teardown();
}
END_TEST

START_TEST(replaces_models_only)
{
    setup();
    qc_outfolder *out;
    ck_assert_int_eq(qc_outfolder_commit(start("m", false, "1"), NULL, &err), QC_OK);
    ck_assert_int_eq(qc_outfolder_open("m", false, &out, &err), QC_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.msg, "exists already"));
    out = start("m", true, "2");
    expect("m/config.json", "1"); /* until the new one is whole */
    ck_assert_int_eq(qc_outfolder_commit(out, NULL, &err), QC_OK);
    expect("m/config.json", "2");
    static const char *const others[] = {".", "..", "m/", "home", "full", "file", "link"};
    ck_assert_int_eq(system("mkdir -p home/sub full; touch home/config.json full/x file; ln -s m link"), 0);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        ck_assert_msg(qc_outfolder_check(others[i], true, &err) == QC_E_USAGE, "%s", others[i]);
    ck_assert_int_eq(n_entries(), 5);
    teardown();
}
END_TEST

START_TEST(other_name_and_late_arrival)
{
    setup();
    for (int i = 0; i < 2; i++)
        ck_assert_int_eq(qc_outfolder_commit(start("m", false, "r"), "m.rejected", &err), QC_OK);
    expect("m.rejected/config.json", "r");
    qc_outfolder *out = start("m", false, "new");
    ck_assert_int_eq(system("mkdir m; echo -n there > m/config.json"), 0);
    ck_assert_int_eq(qc_outfolder_commit(out, NULL, &err), QC_E_USAGE);
    expect("m/config.json", "there");
    ck_assert_int_eq(n_entries(), 2);
    teardown();
}
END_TEST

/* A killed writer's folder is removed by the next one; one at work is left alone. */
START_TEST(stale_folders)
{
    setup();
    pid_t pid = fork();
    if (pid == 0) {
        start("m", false, "{}");
        raise(SIGKILL);
    }
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
    ck_assert_int_eq(n_entries(), 1);
    qc_outfolder *at_work = start("m", false, "{}");
    ck_assert_int_eq(n_entries(), 1);
    pid = fork();
    if (pid == 0) {
        qc_outfolder_discard(start("m", false, "{}"));
        _exit(0);
    }
    ck_assert_int_eq(waitpid(pid, NULL, 0), pid);
    ck_assert_int_eq(qc_outfolder_commit(at_work, NULL, &err), QC_OK);
    ck_assert_int_eq(n_entries(), 1);
    teardown();
}
END_TEST

/* The second signal ends the process at once and leaves nothing. */
START_TEST(second_signal)
{
    setup();
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        qc_signals_install();
        qc_outfile *file;
        qc_outfolder *out = start("m", false, "{}");
        if (qc_outfolder_file(out, "data", &file, &err) == QC_OK)
            raise(SIGTERM);
        raise(SIGTERM);
        _exit(1);
    }
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGTERM);
    ck_assert_int_eq(n_entries(), 0);
    teardown();
}
END_TEST

int main(void)
{
    return run_tests("outfolder", (test_case[]){{"appears when committed", appears_when_committed},
                                                {"replaces models only", replaces_models_only},
                                                {"other name and late arrival", other_name_and_late_arrival},
                                                {"stale folders", stale_folders},
                                                {"second signal", second_signal},
                                                {NULL, NULL}});
}
