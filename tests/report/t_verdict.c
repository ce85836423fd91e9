/* Comparisons and gates against a baseline: error rates by simulation,
 * refusals by hash. */
#include "compare.h"
#include "qc_alloc.h"
#include "qc_rng.h"
#include "report_doc.h"
#include "paired.h"
#include "qc_dist.h"
#include "subject.h"
#include "verdict.h"

#include "qc_test.h"

#include <math.h>

/* ---- simulation ---- */

#define TRIALS 20000

/* Differences of n windows: a window's own offset, and with heavy a tail like that of mean differences of
 * tokens. */
static qc_mean windows_of(qc_rng *rng, int n, double mean, bool heavy)
{
    double d[64];
    for (int i = 0; i < n; i++) {
        double x = qc_rng_normal(rng), chi = 0;
        for (int k = 0; heavy && k < 6; k++) {
            double z = qc_rng_normal(rng);
            chi += z * z;
        }
        d[i] = mean + (heavy ? x / sqrt(chi / 6) : x);
    }
    return qc_mean_of(d, n);
}

/* 4 standard deviations of a share p in TRIALS trials. */
static double spread(double p)
{
    return 4 * sqrt(p * (1 - p) / TRIALS);
}

START_TEST(intervals_cover_what_they_say)
{
    static const int sizes[] = {2, 8, 16, 64};
    qc_rng rng;
    qc_rng_seed(&rng, 1);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
        for (int heavy = 0; heavy < 2; heavy++) {
            int n = sizes[s], inside = 0;
            double t = qc_t_quantile(0.975, n - 1);
            for (int i = 0; i < TRIALS; i++) {
                qc_mean m = windows_of(&rng, n, 0.3, heavy);
                inside += fabs(m.mean - 0.3) <= t * m.se;
            }
            double share = (double)inside / TRIALS;
            /* exact for normal windows; with t6 tails the interval is a little wide, 2 % are allowed */
            ck_assert_msg(fabs(share - 0.95) <= (heavy ? 0.02 : spread(0.95)), "%d windows, heavy %d: %.4f",
                          n, heavy, share);
        }
}
END_TEST

START_TEST(gates_err_as_often_as_they_say)
{
    qc_rng rng;
    qc_rng_seed(&rng, 2);
    for (int heavy = 0; heavy < 2; heavy++) {
        int passed = 0, failed = 0, good = 0, bad = 0;
        for (int i = 0; i < TRIALS; i++) {
            int at_limit = qc_mean_at_most_zero(windows_of(&rng, 16, 0, heavy), 0.95);
            passed += at_limit > 0;
            failed += at_limit < 0;
            good += qc_mean_at_most_zero(windows_of(&rng, 16, -1.5, heavy), 0.95) > 0;
            bad += qc_mean_at_most_zero(windows_of(&rng, 16, 1.5, heavy), 0.95) < 0;
        }
        double slack = heavy ? 0.02 : spread(0.05);
        ck_assert_msg(fabs((double)passed / TRIALS - 0.05) <= slack, "passed at the limit: %d", passed);
        ck_assert_msg(fabs((double)failed / TRIALS - 0.05) <= slack, "failed at the limit: %d", failed);
        /* 1.5 standard deviations of a window away from the limit is 6 standard errors: seen all but surely
         */
        ck_assert_msg(good > 0.99 * TRIALS && bad > 0.99 * TRIALS, "seen %d and %d of %d", good, bad, TRIALS);
    }
}
END_TEST

START_TEST(equal_windows_leave_nothing_undecided)
{
    static const double same[] = {-1, -1, -1}, none[] = {0, 0}, more[] = {0.5, 0.5};
    ck_assert_int_eq(qc_mean_at_most_zero(qc_mean_of(same, 3), 0.95), 1);
    ck_assert_int_eq(qc_mean_at_most_zero(qc_mean_of(none, 2), 0.95), 1);
    ck_assert_int_eq(qc_mean_at_most_zero(qc_mean_of(more, 2), 0.95), -1);
    ck_assert(isnan(qc_mean_of(same, 1).se) && qc_mean_of(same, 1).mean == -1);
}
END_TEST

/* ---- reports ---- */

/* A report with these windows (mean NLL, KL divergence, top-1 share each) and a tensor. */
static cJSON *report_of(double (*windows)[3], int n, double error, double error_rtn)
{
    char text[8192];
    size_t k = 0;
    double nll = 0, kld = 0, top1 = 0;
    for (int i = 0; i < n; i++) {
        nll += windows[i][0] / n;
        kld += windows[i][1] / n;
        top1 += windows[i][2] / n;
    }
    k += (size_t)snprintf(
        text, sizeof text,
        "{\"schema\":\"qconvert-report/"
        "1\",\"tool\":{\"name\":\"q\",\"version\":\"1\",\"compute\":\"f32\"},\"model\":{\"path\":\"m\","
        "\"family\":\"f\",\"layers\":1,\"files\":[{\"file\":\"m/model.safetensors\",\"sha256\":\"aa\"},"
        "{\"file\":\"m/"
        "tokenizer.json\",\"sha256\":\"bb\"}]},\"recipe\":{\"run\":{\"threads\":1}},\"plan\":{},"
        "\"calibration\":null,"
        "\"tensors\":[{\"name\":\"w\",\"action\":\"quantized\",\"rule\":\"r\",\"layer\":0,\"source_dtype\":"
        "\"bf16\",\"rows\":4,"
        "\"cols\":4,\"bits\":4,\"bytes_in\":32,\"bytes_out\":9,\"relative_error\":0.01,\"error\":%.17g,"
        "\"error_rtn\":%.17g}],"
        "\"layers\":[],\"events\":[],\"artifacts\":[{\"format\":\"qpk\",\"path\":\"a.qpk\",\"bytes\":1000,"
        "\"sha256\":\"cc\","
        "\"rejected\":false}],\"gates\":[],\"timings\":{\"total\":2},\"peak_rss_bytes\":5000,\"evaluation\":{"
        "\"protocol\":\"gptq\","
        "\"text\":\"t\",\"windows\":%d,\"length\":8,\"tokens_scored\":%d,\"text_sha256\":\"dd\",\"ids_"
        "sha256\":\"ee\",\"ppl\":%.17g,"
        "\"ppl_reference\":9,\"ppl_ratio\":1.1,\"delta_nll\":0.1,\"delta_nll_se\":0.01,\"kld_mean\":%.17g,"
        "\"kld_p99\":0.2,"
        "\"kld_max\":0.5,\"top1\":%.17g,\"per_window\":[",
        error, error_rtn, n, 7 * n, exp(nll), kld, top1);
    for (int i = 0; i < n; i++)
        k += (size_t)snprintf(text + k, sizeof text - k,
                              "%s{\"nll\":%.17g,\"nll_reference\":2,\"kld\":%.17g,\"top1\":%.17g}",
                              i ? "," : "", windows[i][0], windows[i][1], windows[i][2]);
    snprintf(text + k, sizeof text - k, "]}}");
    cJSON *doc;
    qc_err err;
    ck_assert_msg(qc_json_parse(text, strlen(text), "r", true, &doc, &err) == QC_OK, "%s", err.msg);
    ck_assert_msg(qc_report_check(doc, "r", &err) == QC_OK, "%s", err.msg);
    return doc;
}

static double base_windows[4][3] = {
    {2.0, 0.010, 0.95}, {2.2, 0.012, 0.94}, {2.1, 0.011, 0.96}, {2.4, 0.014, 0.93}};

/* Pass and reason of one gate. */
static bool judged(const cJSON *a, const cJSON *b, qc_gate_rule rule, bool undecided_passes,
                   const char *reason)
{
    cJSON *doc;
    qc_err err;
    ck_assert_msg(qc_gate_rule_check(&rule, &err) == QC_OK, "%s", err.msg);
    qc_gate_rules rules = {
        .rules = &rule, .n_rules = 1, .confidence = 0.95, .undecided_passes = undecided_passes};
    ck_assert_int_eq(qc_verdict_make(&(qc_report_pair){a, b, "a.json", "b.json"}, &rules, &doc, &err), QC_OK);
    const cJSON *gate = qc_json_get(doc, "gates")->child;
    bool pass = cJSON_IsTrue(qc_json_get(gate, "pass"));
    ck_assert_int_eq(pass, cJSON_IsTrue(qc_json_get(doc, "passed")));
    ck_assert_msg(strstr(qc_report_string(gate, "reason"), reason) != NULL, "%s: \"%s\" lacks \"%s\"",
                  rule.name, qc_report_string(gate, "reason"), reason);
    cJSON_Delete(doc);
    return pass;
}

START_TEST(windows_decide_gates_against_a_baseline)
{
    double better[4][3], worse[4][3], noisy[4][3];
    static const double noise[4] = {0.05, -0.05, 0.06, -0.04};
    for (int i = 0; i < 4; i++) {
        memcpy(better[i], base_windows[i], sizeof better[i]);
        memcpy(worse[i], base_windows[i], sizeof worse[i]);
        memcpy(noisy[i], base_windows[i], sizeof noisy[i]);
        better[i][0] -= 0.01 + 0.001 * i;
        better[i][1] *= 0.9;
        worse[i][0] += 0.03 + 0.001 * i;
        worse[i][1] *= 1.5;
        worse[i][2] -= 0.02 + 0.001 * i;
        noisy[i][0] += noise[i];
    }
    cJSON *b = report_of(base_windows, 4, 3, 4), *good = report_of(better, 4, 3, 4),
          *bad = report_of(worse, 4, 3, 4), *unsure = report_of(noisy, 4, 3, 4);
    qc_gate_rule ppl = {"ppl", 1.005, true}, kld = {"kld_mean", 1.1, true}, top1 = {"top1", -0.005, true};
    ck_assert(judged(b, b, ppl, false, "1 times the baseline's, at most 1.005 (4 windows, 95 % sure)"));
    ck_assert(judged(b, b, (qc_gate_rule){"ppl", 1, true}, false, "1 times"));
    ck_assert(judged(good, b, ppl, false, "95 % sure") && judged(good, b, kld, false, "0.9 times"));
    ck_assert(!judged(bad, b, ppl, false, "95 % sure") &&
              !judged(bad, b, kld, false, "1.5 times the baseline's, at most 1.1"));
    ck_assert(!judged(bad, b, top1, false, "-0.0215 on the baseline, at least -0.005 (4 windows"));
    ck_assert(!judged(unsure, b, ppl, false, ": 4 windows do not decide it at 95 %, score more"));
    ck_assert(judged(unsure, b, ppl, true, "do not decide it"));
    /* without windows the plain figures count */
    cJSON_DeleteItemFromObjectCaseSensitive(cJSON_GetObjectItemCaseSensitive(bad, "evaluation"),
                                            "per_window");
    ck_assert(!judged(bad, b, ppl, true, "plain figures"));
    cJSON_Delete(b);
    cJSON_Delete(good);
    cJSON_Delete(bad);
    cJSON_Delete(unsure);
}
END_TEST

START_TEST(figures_of_run_and_tensors)
{
    cJSON *b = report_of(base_windows, 4, 2, 4), *a = report_of(base_windows, 4, 4, 4);
    ck_assert(
        judged(a, b, (qc_gate_rule){"size_bytes", 1, true}, false, "1 times the baseline's, at most 1"));
    ck_assert(
        judged(a, b, (qc_gate_rule){"fallbacks", 0, true}, false, "0 more than the baseline, at most 0"));
    ck_assert(judged(a, b, (qc_gate_rule){"tensor_error", 1, true}, false, "worst is w, 1 times"));
    ck_assert(!judged(a, b, (qc_gate_rule){"tensor_gain", 1.5, true}, false,
                      "worst is w, 2 times the baseline's, at most 1.5"));
    ck_assert(judged(a, b, (qc_gate_rule){"tensor_gain", 2, true}, false, "2 times"));
    ck_assert(judged(a, NULL, (qc_gate_rule){"kld_mean", 0.02, false}, false, "0.01175, at most 0.02"));
    ck_assert(!judged(a, NULL, (qc_gate_rule){"top1", 0.99, false}, false, "at least 0.99"));
    cJSON_SetNumberValue(cJSON_GetObjectItemCaseSensitive(a, "peak_rss_bytes"), 6000);
    ck_assert(!judged(a, b, (qc_gate_rule){"peak_rss_bytes", 1.1, true}, false, "1.2 times"));
    /* what is not there never passes */
    cJSON *t = cJSON_GetObjectItemCaseSensitive(b, "tensors")->child;
    cJSON_ReplaceItemInObjectCaseSensitive(t, "name", cJSON_CreateString("v"));
    ck_assert(!judged(a, b, (qc_gate_rule){"tensor_error", 1e9, true}, true, "w was treated otherwise"));
    cJSON_ReplaceItemInObjectCaseSensitive(a, "evaluation", cJSON_CreateNull());
    ck_assert(!judged(a, b, (qc_gate_rule){"ppl", 1e9, true}, true, "was not measured in both"));
    ck_assert(!judged(a, b, (qc_gate_rule){"kld_p99", 1e9, true}, true, "was not measured in both"));
    ck_assert(!judged(a, NULL, (qc_gate_rule){"ppl", 1e9, false}, true, "was not measured"));
    cJSON_Delete(a);
    cJSON_Delete(b);
}
END_TEST

START_TEST(rules_are_checked)
{
    static const struct {
        qc_gate_rule rule;
        const char *message;
    } cases[] = {{{"kld", 1, true}, "no gate against a baseline is called \"kld\" (ppl, kld_mean, top1"},
                 {{"kld", 1, false}, "no gate is called \"kld\""},
                 {{"ppl", 0, true}, "gate ppl: 0 is no factor above 0"},
                 {{"ppl", NAN, true}, "gate ppl: nan is no factor"},
                 {{"top1", -5, true}, "gate top1: -5 is no difference of fractions"},
                 {{"top1", 93, false}, "gate top1: the limit 93 is no fraction"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qc_err err = {0};
        ck_assert_int_eq(qc_gate_rule_check(&cases[i].rule, &err), QC_E_USAGE);
        ck_assert_msg(strncmp(err.msg, cases[i].message, strlen(cases[i].message)) == 0, "%s", err.msg);
    }
}
END_TEST

static void set_text(cJSON *object, const char *key, const char *text)
{
    cJSON_ReplaceItemInObjectCaseSensitive(object, key, cJSON_CreateString(text));
}

START_TEST(other_subjects_are_refused_by_hash)
{
    qc_err err = {0};
    cJSON *a = report_of(base_windows, 4, 3, 4), *b = cJSON_Duplicate(a, true);
    qc_report_pair pair = {a, b, "a.json", "b.json"};
    cJSON *files = cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(b, "model"), "files");
    cJSON *e = cJSON_GetObjectItemCaseSensitive(b, "evaluation");
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_OK);
    set_text(files->child, "file", "elsewhere/model.safetensors"); /* another folder is the same model */
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_OK);
    set_text(files->child, "sha256", "ff");
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_E_INPUT);
    ck_assert_str_eq(
        err.msg,
        "a.json and b.json are of different models: model.safetensors differs (--other-model compares them)");
    ck_assert_int_eq(qc_subject_check(&pair, true, &err), QC_OK);
    set_text(files->child, "sha256", "aa");
    set_text(e, "ids_sha256", "00");
    ck_assert_int_eq(qc_subject_check(&pair, true, &err), QC_E_INPUT);
    ck_assert_str_eq(err.msg, "a.json and b.json were scored on different tokens (ids_sha256 ee and 00)");
    set_text(files->child->next, "sha256", "00");
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_E_INPUT);
    ck_assert_str_eq(err.msg, "a.json and b.json have different tokenizers: tokenizer.json differs");
    cJSON_SetNumberValue(cJSON_GetObjectItemCaseSensitive(e, "windows"), 3);
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "on 4 windows of 8 tokens, b.json on 3 of 8"));
    set_text(e, "text_sha256", "99");
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "different texts (sha256 dd and 99)"));
    set_text(e, "protocol", "full");
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(strstr(err.msg, "by protocol gptq, b.json by full"));
    cJSON_Delete(a);
    cJSON_Delete(b);
}
END_TEST

START_TEST(comparisons_find_what_differs)
{
    cJSON *a = report_of(base_windows, 4, 3, 4), *b = cJSON_Duplicate(a, true), *c = cJSON_Duplicate(a, true);
    qc_report_pair same = {a, b, "a.json", "b.json"}, other = {a, c, "a.json", "c.json"};
    cJSON_SetNumberValue(cJSON_GetObjectItemCaseSensitive(b, "peak_rss_bytes"),
                         9000); /* told, does not count */
    cJSON *doc = qc_compare_make(&same, 0);
    ck_assert(cJSON_IsTrue(qc_json_get(doc, "same")));
    cJSON_Delete(doc);
    cJSON_SetNumberValue(
        cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(c, "evaluation"), "kld_mean"),
        0.0118);
    cJSON_SetNumberValue(
        cJSON_GetObjectItemCaseSensitive(
            cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(c, "recipe"), "run"),
            "threads"),
        2);
    doc = qc_compare_make(&other, 1e-6);
    ck_assert(!cJSON_IsTrue(qc_json_get(doc, "same")));
    ck_assert_str_eq(qc_report_string(qc_json_get(doc, "settings")->child, "key"), "run.threads");
    qc_buf text = {0};
    ck_assert_int_eq(qc_compare_render(doc, QC_RENDER_TEXT, &text, NULL), QC_OK);
    ck_assert_ptr_nonnull(strstr(text.data, "a.json -> c.json: different\n"));
    ck_assert_ptr_nonnull(strstr(text.data, "  kld_mean       0.01175 -> 0.0118 (x 1.0043)  differs\n"));
    ck_assert_ptr_nonnull(strstr(text.data, "run.threads: 1 -> 2\n"));
    qc_buf_clear(&text);
    cJSON_Delete(doc);
    doc = qc_compare_make(&other, 0.01);
    ck_assert(cJSON_IsTrue(qc_json_get(doc, "same")));
    cJSON_Delete(doc);
    for (long nth = 1; nth < 60; nth += 7) {
        qc_alloc_fail_at(nth);
        doc = qc_compare_make(&other, 0);
        qc_alloc_fail_at(0);
        ck_assert_ptr_null(doc);
    }
    cJSON_Delete(a);
    cJSON_Delete(b);
    cJSON_Delete(c);
}
END_TEST

/* One more output, with the first one's evaluation but for its mean divergence. */
static void put_output(cJSON *doc, const char *path, const char *format, double kld)
{
    qc_err err;
    cJSON *item = cJSON_CreateObject();
    cJSON *e = cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(doc, "evaluation"), true);
    cJSON_AddStringToObject(item, "path", path);
    cJSON_AddStringToObject(item, "format", format);
    cJSON_AddNumberToObject(item, "bytes", 1000);
    cJSON_AddStringToObject(item, "sha256", "cc");
    cJSON_AddFalseToObject(item, "rejected");
    cJSON_SetNumberValue(cJSON_GetObjectItemCaseSensitive(e, "kld_mean"), kld);
    cJSON_ReplaceItemInObjectCaseSensitive(e, "per_window", cJSON_CreateArray());
    cJSON_AddItemToObject(item, "evaluation", e);
    cJSON_AddItemToObject(item, "tensors",
                          cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(doc, "tensors"), true));
    cJSON_AddItemToObject(item, "gates", cJSON_CreateArray());
    cJSON_AddItemToArray(cJSON_GetObjectItemCaseSensitive(doc, "artifacts"), item);
    ck_assert_msg(qc_report_check(doc, "r", &err) == QC_OK, "%s", err.msg);
}

static void set_output(cJSON *doc, int i, const char *path, const char *format)
{
    cJSON *item = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(doc, "artifacts"), i);
    set_text(item, "path", path);
    set_text(item, "format", format);
}

START_TEST(outputs_answer_by_name_and_format)
{
    static const char *const shown[] = {"  output v1/a.qpk -> v2/a.qpk\n",
                                        "  output v1/one.gguf -> v2/x.gguf\n",
                                        "  output v1/m.gguf -> v2/m.gguf\n"};
    cJSON *a = report_of(base_windows, 4, 3, 4), *b = cJSON_Duplicate(a, true);
    qc_report_pair pair = {a, b, "a.json", "b.json"};
    qc_gate_rule rule = {"kld_mean", 1.5, true};
    qc_gate_rules rules = {.rules = &rule, .n_rules = 1, .confidence = 0.95};
    qc_err err = {0};
    int *match;
    set_output(a, 0, "v1/a.qpk", "qpk");
    put_output(a, "v1/one.gguf", "gguf", 0.02);
    put_output(a, "v1/m.gguf", "gguf", 0.03);
    set_output(b, 0, "v2/m.gguf", "gguf");
    put_output(b, "v2/a.qpk", "qpk", 0.01);
    put_output(b, "v2/x.gguf", "gguf", 0.02);
    ck_assert_int_eq(qc_subject_match(&pair, &match, &err), QC_OK);
    ck_assert(match[0] == 1 && match[1] == 2 && match[2] == 0);
    qc_free(match);
    cJSON *doc = qc_compare_make(&pair, 1e-6), *verdict;
    ck_assert(!cJSON_IsTrue(qc_json_get(doc, "same"))); /* a.qpk .01175 -> .01, m.gguf .03 -> .01175 */
    qc_buf text = {0};
    ck_assert_int_eq(qc_compare_render(doc, QC_RENDER_TEXT, &text, NULL), QC_OK);
    for (size_t i = 0; i < sizeof shown / sizeof shown[0]; i++)
        ck_assert_msg(strstr(text.data, shown[i]) != NULL, "%s", text.data);
    ck_assert_ptr_nonnull(strstr(text.data, "kld_mean       0.02 -> 0.02\n"));
    ck_assert_ptr_nonnull(strstr(text.data, "kld_mean       0.03 -> 0.01175 (x 0.39167)  differs\n"));
    qc_buf_clear(&text);
    cJSON_Delete(doc);
    ck_assert_int_eq(qc_verdict_make(&pair, &rules, &verdict, &err), QC_OK);
    static const double ratios[] = {0.01175 / 0.01, 1, 0.03 / 0.01175};
    const cJSON *gates = qc_json_get(verdict, "gates");
    for (int i = 0; i < 3; i++) {
        const cJSON *gate = cJSON_GetArrayItem(gates, i);
        ck_assert_double_eq_tol(qc_report_number(gate, "value"), ratios[i], 1e-9);
        ck_assert_int_eq(cJSON_IsTrue(qc_json_get(gate, "pass")), i < 2);
    }
    cJSON_Delete(verdict);
    /* the second output alone differs */
    cJSON_Delete(b);
    pair.b = b = cJSON_Duplicate(a, true);
    doc = qc_compare_make(&pair, 0);
    ck_assert(cJSON_IsTrue(qc_json_get(doc, "same")));
    cJSON_Delete(doc);
    cJSON *second = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(b, "artifacts"), 1);
    cJSON *e = cJSON_GetObjectItemCaseSensitive(second, "evaluation");
    cJSON_SetNumberValue(cJSON_GetObjectItemCaseSensitive(e, "kld_mean"), 0.021);
    doc = qc_compare_make(&pair, 1e-6);
    ck_assert(!cJSON_IsTrue(qc_json_get(doc, "same")));
    cJSON_Delete(doc);
    set_text(e, "ids_sha256", "00");
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_E_INPUT);
    /* one that has none of its kind on the other side */
    set_output(b, 1, "v1/folder", "gptq");
    ck_assert_int_eq(qc_subject_check(&pair, false, &err), QC_OK);
    doc = qc_compare_make(&pair, 1e-6);
    ck_assert(!cJSON_IsTrue(qc_json_get(doc, "same")));
    ck_assert_int_eq(qc_compare_render(doc, QC_RENDER_MARKDOWN, &text, NULL), QC_OK);
    ck_assert_msg(strstr(text.data, "**v1/one.gguf -> none**\n") &&
                      strstr(text.data, "**none -> v1/folder**\n"),
                  "%s", text.data);
    qc_buf_clear(&text);
    cJSON_Delete(doc);
    ck_assert_int_eq(qc_verdict_make(&pair, &rules, &verdict, &err), QC_E_INPUT);
    ck_assert_str_eq(err.msg, "a.json: its output v1/one.gguf has none in b.json to be judged against");
    cJSON_DeleteItemFromArray(cJSON_GetObjectItemCaseSensitive(a, "artifacts"), 1);
    ck_assert_int_eq(qc_verdict_make(&pair, &rules, &verdict, &err), QC_E_INPUT);
    ck_assert_str_eq(err.msg, "a.json has 2 outputs, the baseline b.json has 3");
    cJSON_Delete(a);
    cJSON_Delete(b);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"intervals_cover_what_they_say", intervals_cover_what_they_say},
        {"gates_err_as_often_as_they_say", gates_err_as_often_as_they_say},
        {"equal_windows_leave_nothing_undecided", equal_windows_leave_nothing_undecided},
        {"windows_decide_gates_against_a_baseline", windows_decide_gates_against_a_baseline},
        {"figures_of_run_and_tensors", figures_of_run_and_tensors},
        {"rules_are_checked", rules_are_checked},
        {"other_subjects_are_refused_by_hash", other_subjects_are_refused_by_hash},
        {"comparisons_find_what_differs", comparisons_find_what_differs},
        {"outputs_answer_by_name_and_format", outputs_answer_by_name_and_format},
        {0},
    };
    return run_tests("verdict", cases);
}
