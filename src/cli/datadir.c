#include "datadir.h"

#include "qc_alloc.h"
#include "qc_file.h"

#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

/* Candidates in this order: <exe>/../share/qconvert (any prefix, DESTDIR included), the source tree of an
 * uninstalled build (build/src/cli), the configured data folder. `instead` ends the message: the way out, or
 * "". */
static int find(const char *installed, const char *in_tree, const char *instead, char **ret, qc_err *err)
{
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = 0;
    char *folder = qc_path_dir(exe);
    char *candidates[3] = {
        folder ? qc_asprintf("%s/../share/qconvert/%s", folder, installed) : NULL,
        folder ? qc_asprintf("%s/../../../tests/data/%s", folder, in_tree) : NULL,
        qc_asprintf("%s/qconvert/%s", QC_DATADIR, installed),
    };
    char *found = NULL;
    for (int i = 0; i < 3; i++) {
        if (!found && candidates[i] && qc_path_exists(candidates[i]))
            found = candidates[i];
        else
            qc_free(candidates[i]);
    }
    qc_free(folder);
    if (!found)
        return qc_fail(err, QC_E_INPUT, "%s/qconvert/%s: the bundled demo data are not installed%s",
                       QC_DATADIR, installed, instead);
    char whole[PATH_MAX]; /* without the dots, for people to read */
    *ret = qc_strdup(realpath(found, whole) ? whole : found);
    qc_free(found);
    return *ret ? QC_OK : qc_fail_nomem(err, installed, PATH_MAX);
}

int qc_demo_model(char **ret, qc_err *err)
{
    return find("demo/model", "models/demo-qwen3", "", ret, err);
}

int qc_demo_text(char **ret, qc_err *err)
{
    return find("demo/heldout.txt", "text/austen-heldout.txt", "; name a text of your own with --text", ret,
                err);
}

int qc_demo_calibration(char **ret, qc_err *err)
{
    return find("demo/calib.txt", "text/austen-calib.txt", "; name a text of your own with --calib", ret,
                err);
}
