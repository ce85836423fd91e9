#include "datadir.h"
#include "job.h"
#include "main.h"
#include "programs.h"
#include "qc_alloc.h"
#include "qc_file.h"
#include "recipe.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What `qconvert --demo` makes: the grids that a user meets first. */
static const struct {
    const char *name, *title;
    int bits;
    bool symmetric;
    int search;
    qc_method method;
} demo_steps[] = {
    {"demo-int8", "INT8, groups of 128, symmetric", 8, true, QC_SEARCH_MSE, QC_METHOD_RTN},
    {"demo-int4-minmax", "INT4, groups of 128, asymmetric, min-max scales", 4, false, QC_SEARCH_MINMAX,
     QC_METHOD_RTN},
    {"demo-int4", "INT4, groups of 128, asymmetric, searched scales", 4, false, QC_SEARCH_MSE, QC_METHOD_RTN},
    {"demo-int4-gptq", "INT4, groups of 128, asymmetric, GPTQ", 4, false, QC_SEARCH_MSE, QC_METHOD_GPTQ},
};

#define DEMO_FOLDER "qconvert-demo"

static int replace_string(char **field, const char *text, qc_err *err)
{
    char *copy = qc_strdup(text);
    if (!copy)
        return qc_fail_nomem(err, text, strlen(text));
    qc_free(*field);
    *field = copy;
    return QC_OK;
}

/* calib_text: for the steps that calibrate. */
static int demo_step(qc_recipe *recipe, const qc_job_options *options, char *calib_text, size_t i,
                     qc_err *err)
{
    char path[256];
    recipe->quantize.method = (int)demo_steps[i].method;
    recipe->calibration.text = demo_steps[i].method == QC_METHOD_RTN ? NULL : calib_text;
    recipe->quantize.weights.bits = demo_steps[i].bits;
    recipe->quantize.weights.group = 128;
    recipe->quantize.weights.symmetric = demo_steps[i].symmetric;
    recipe->quantize.weights.search = demo_steps[i].search;
    snprintf(path, sizeof path, DEMO_FOLDER "/%s.qpk", demo_steps[i].name);
    QC_TRY(replace_string(&recipe->emit[0].path, path, err));
    snprintf(path, sizeof path, DEMO_FOLDER "/%s.json", demo_steps[i].name);
    QC_TRY(replace_string(&recipe->report.json, path, err));
    if (!options->quiet && !options->json)
        printf("%s== %s\n", i ? "\n" : "", demo_steps[i].title);
    int rc = qc_job_run(recipe, options, err);
    recipe->calibration.text = calib_text;
    return rc;
}

/* All demo steps; the worst exit code counts. */
static int run_demo(qc_recipe *recipe, qc_job_options options, qc_err *err)
{
    bool made = mkdir(DEMO_FOLDER, 0777) == 0;
    if (!made && !qc_path_is_dir(DEMO_FOLDER))
        return qc_fail(err, QC_E_RESOURCE, DEMO_FOLDER ": can not make the folder for the demo's files");
    if (!(recipe->emit = qc_calloc(1, sizeof *recipe->emit)))
        return qc_fail_nomem(err, "emit", sizeof *recipe->emit);
    recipe->n_emit = 1;
    recipe->emit[0].format = QC_EMIT_QPK;
    recipe->verify.length = recipe->verify.length ? recipe->verify.length : 512;
    recipe->calibration.length = recipe->calibration.length ? recipe->calibration.length : 512;
    if (!recipe->calibration.text)
        QC_TRY(qc_demo_calibration(&recipe->calibration.text, err));
    options.force = true; /* its folder is its own */
    int worst = 0;
    for (size_t i = 0; i < sizeof demo_steps / sizeof demo_steps[0] && worst >= 0; i++) {
        int rc = demo_step(recipe, &options, recipe->calibration.text, i, err);
        worst = rc < 0 || rc > worst ? rc : worst;
    }
    if (made && options.dry_run)
        rmdir(DEMO_FOLDER); /* a plan leaves nothing behind */
    return worst;
}

static int run(const qc_args *args, qc_recipe *recipe, qc_err *err)
{
    qc_job_options options = {
        .force = qc_args_has(args, "force"),
        .resume = qc_args_has(args, "resume"),
        .keep_failed = qc_args_has(args, "keep-failed"),
        .dry_run = qc_args_has(args, "dry-run"),
        .json = qc_args_has(args, "json"),
        .quiet = qc_args_has(args, "quiet"),
    };
    bool demo = qc_args_has(args, "demo");
    if (demo && args->n_operands)
        return qc_args_fail(&qc_program_qconvert, err, "--demo brings its own model, '%.80s' is one too many",
                            args->operands[0]);
    if (demo && !recipe->model)
        QC_TRY(qc_demo_model(&recipe->model, err));
    if (demo && recipe->n_emit == 0)
        return run_demo(recipe, options, err);
    if (!recipe->model)
        return qc_args_fail(&qc_program_qconvert, err, "no model: name a checkpoint folder or a recipe");
    if (recipe->n_emit == 0)
        return qc_args_fail(&qc_program_qconvert, err, "no output: name one with -o OUT.qpk");
    return qc_job_run(recipe, &options, err);
}

static int qconvert(const qc_args *args, qc_err *err)
{
    qc_recipe recipe;
    QC_TRY(qc_recipe_load(args, &recipe, err));
    int rc = run(args, &recipe, err);
    qc_recipe_clear(&recipe);
    return rc;
}

int main(int argc, char **argv)
{
    return qc_main(&qc_program_qconvert, argc, argv, qconvert);
}
