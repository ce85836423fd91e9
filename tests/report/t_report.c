/* Report, manifest and gates: the keys that scripts rely on, the direction of every gate, no silent gaps. */
#include "gates.h"
#include "qc_alloc.h"
#include "report.h"

#include "qc_test.h"

#include <math.h>

static qc_event_list events;
static qc_account_list accounts;
static qc_evaluation evaluation;
static qc_window_result windows[2] = {
    {.tokens_scored = 4, .nll = 8, .nll_reference = 4, .kld = 2, .top1_agree = 3},
    {.tokens_scored = 4, .nll = NAN, .nll_reference = NAN, .kld = NAN}};
static qc_gate gates[] = {{.name = "kld_mean", .limit = 0.1, .value = 0.05, .pass = true}};
static qc_report_output outputs[1];
static const qc_report_file files[] = {{"/data/models/m/model.safetensors", "aa"},
                                       {"/data/models/m/config.json", "bb"}};
static const qc_report_timing timings[] = {{"convert", 1.5}, {"verify", 2.5}};
static const qc_calibration calibration = {.text = "c.txt",
                                           .windows = 4,
                                           .length = 8,
                                           .tokens = 32,
                                           .sample = "even",
                                           .ids_sha256 = "dd",
                                           .ppl = 12.5};
static qc_report_input input;
static cJSON *recipe, *plan;

static void setup(void)
{
    qc_tensor_account q = {.name = (char *)"model.layers.0.w",
                           .rule = (char *)"linear",
                           .action = QC_ACTION_QUANTIZED,
                           .layer = 0,
                           .source_dtype = QC_DT_BF16,
                           .dtype = QC_DT_GRID,
                           .n_rows = 2,
                           .n_cols = 8,
                           .bits = 4,
                           .group_elems = 8,
                           .bytes_in = 32,
                           .bytes_out = 12,
                           .sq_error = 1,
                           .sq_weight = 100,
                           .n_clipped = 4,
                           .solve = {.method = "gptq",
                                     .order = "static",
                                     .error = 3,
                                     .error_rtn = 4,
                                     .error_norm = 50,
                                     .damp = 0.01,
                                     .n_dead = 5,
                                     .n_tokens = 32,
                                     .n_rtn_rows = 6,
                                     .seconds = 0.25}};
    qc_layer_times times = {.forward = 1, .hessian = 2, .factor = 3, .solve = 4, .pack = 5, .io = 6};
    qc_tensor_account n = {.name = (char *)"model.norm",
                           .action = QC_ACTION_COPIED,
                           .layer = -1,
                           .source_dtype = QC_DT_F32,
                           .dtype = QC_DT_F32,
                           .n_rows = 1,
                           .n_cols = 8,
                           .bits = 32,
                           .bytes_in = 32,
                           .bytes_out = 32};
    ck_assert_int_eq(qc_account_add(&accounts, &q, NULL), QC_OK);
    ck_assert_int_eq(qc_account_add(&accounts, &n, NULL), QC_OK);
    ck_assert_int_eq(qc_account_add_layer(&accounts, &times, NULL), QC_OK);
    ck_assert_int_eq(qc_event_add(&events, QC_EVENT_FALLBACK, "group_fallback", "w", 2, NULL, "128 to 64"),
                     QC_OK);
    qc_evaluation_init(&evaluation);
    evaluation.protocol = (char *)"gptq";
    evaluation.windows = 2;
    evaluation.ppl = 20.5;
    evaluation.per_window = windows;
    recipe = cJSON_Parse("{\"bits\": 4}");
    plan = cJSON_Parse("{\"steps\": []}");
    outputs[0] =
        (qc_report_output){.artifact = {.format = "qpk", .path = "out/a.qpk", .n_bytes = 44, .sha256 = "cc"},
                           .accounts = &accounts,
                           .evaluation = &evaluation,
                           .gates = gates,
                           .n_gates = 1};
    input = (qc_report_input){.tool = {.name = "qconvert",
                                       .version = "0.1.0",
                                       .commit = "abc",
                                       .kernels = "avx2",
                                       .compute = "f32"},
                              .model_path = "/data/models/m",
                              .model_family = "qwen3",
                              .n_layers = 1,
                              .sources = files,
                              .n_sources = 2,
                              .recipe = recipe,
                              .plan = plan,
                              .outputs = outputs,
                              .n_outputs = 1,
                              .events = &events,
                              .calibration = &calibration,
                              .timings = timings,
                              .n_timings = 2,
                              .peak_rss_bytes = 1000};
}

static void teardown(void)
{
    cJSON_Delete(recipe);
    cJSON_Delete(plan);
    qc_account_list_clear(&accounts);
    qc_event_list_clear(&events);
}

static double number(const cJSON *doc, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(doc, key);
    return cJSON_IsNumber(item) ? item->valuedouble : NAN;
}

START_TEST(report_has_the_keys_of_version_1)
{
    static const char *const keys[] = {"schema",      "tool",    "model",   "recipe",        "plan",
                                       "calibration", "tensors", "layers",  "events",        "evaluation",
                                       "artifacts",   "gates",   "timings", "peak_rss_bytes"};
    static const char *const eval_keys[] = {
        "protocol",  "windows",   "length",       "tokens_scored", "ids_sha256", "ppl",     "ppl_reference",
        "ppl_ratio", "delta_nll", "delta_nll_se", "kld_mean",      "kld_p99",    "kld_max", "top1"};
    setup();
    cJSON *doc = qc_report_document(&input);
    const cJSON *item = doc->child;
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++, item = item->next)
        ck_assert_str_eq(item->string, keys[i]);
    const cJSON *e = qc_json_get(doc, "evaluation");
    for (size_t i = 0; i < sizeof eval_keys / sizeof eval_keys[0]; i++)
        ck_assert_msg(cJSON_GetObjectItemCaseSensitive(e, eval_keys[i]) != NULL, "%s", eval_keys[i]);
    ck_assert(number(e, "ppl") == 20.5 && isnan(number(e, "kld_mean"))); /* not measured: null */
    const cJSON *w = qc_json_get(e, "per_window")->child;
    ck_assert(number(w, "nll") == 2 && number(w, "kld") == 0.5 && number(w, "top1") == 0.75);
    ck_assert(isnan(number(w->next, "kld")) && isnan(number(w->next, "top1")));
    const cJSON *t = qc_json_get(doc, "tensors")->child;
    ck_assert(number(t, "relative_error") == 0.01 && number(t, "group") == 8);
    ck_assert_str_eq(qc_json_get(t, "method")->valuestring, "gptq");
    ck_assert_str_eq(qc_json_get(t, "order")->valuestring, "static");
    ck_assert(number(t, "error") == 3 && number(t, "error_rtn") == 4 && number(t, "error_norm") == 50);
    ck_assert(number(t, "damp") == 0.01 && number(t, "dead_columns") == 5 && number(t, "tokens") == 32);
    ck_assert(number(t, "rtn_rows") == 6 && number(t, "seconds") == 0.25 &&
              number(t, "clipped_fraction") == 0.25);
    const cJSON *s = qc_json_get(qc_json_get(doc, "layers")->child, "seconds");
    ck_assert(number(s, "forward") == 1 && number(s, "hessian") == 2 && number(s, "factor") == 3);
    ck_assert(number(s, "solve") == 4 && number(s, "pack") == 5 && number(s, "io") == 6);
    const cJSON *c = qc_json_get(doc, "calibration");
    ck_assert(number(c, "windows") == 4 && number(c, "tokens") == 32 && number(c, "ppl") == 12.5);
    ck_assert_str_eq(qc_json_get(c, "ids_sha256")->valuestring, "dd");
    ck_assert_str_eq(qc_json_get(t->next, "action")->valuestring, "copied");
    ck_assert_ptr_null(qc_json_get(t->next, "method"));
    ck_assert_ptr_null(qc_json_get(t->next, "group"));
    ck_assert(number(qc_json_get(doc, "layers")->child, "bytes_out") == 12);
    ck_assert(number(qc_json_get(doc, "events")->child, "count") == 2);
    ck_assert(number(qc_json_get(doc, "timings"), "verify") == 2.5);
    ck_assert(cJSON_IsTrue(qc_json_get(qc_json_get(doc, "gates")->child, "pass")));
    cJSON_Delete(doc);
    outputs[0].evaluation = NULL;
    doc = qc_report_document(&input);
    ck_assert(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(doc, "evaluation")));
    cJSON_Delete(doc);
    teardown();
}
END_TEST

/* Equal runs give equal manifests wherever they ran; the embedded one knows nothing of outputs and machines.
 */
START_TEST(manifest_names_no_place)
{
    setup();
    for (int embedded = 0; embedded < 2; embedded++) {
        cJSON *doc = qc_manifest_document(&input, embedded);
        char *text = qc_json_print(doc);
        ck_assert_ptr_null(strstr(text, "/data"));
        ck_assert_ptr_null(strstr(text, "out/"));
        ck_assert_ptr_nonnull(strstr(text, "model.safetensors"));
        ck_assert((strstr(text, "avx2") == NULL) == embedded && (strstr(text, "a.qpk") == NULL) == embedded);
        qc_free(text);
        cJSON_Delete(doc);
    }
    teardown();
}
END_TEST

START_TEST(gates_know_their_direction)
{
    static const char *const largest[] = {"ppl",     "ppl_ratio", "delta_nll",  "kld_mean", "kld_p99",
                                          "kld_max", "fallbacks", "size_bytes", "seconds",  "peak_rss_bytes"};
    qc_evaluation e;
    qc_evaluation_init(&e);
    e.ppl = e.ppl_ratio = e.delta_nll = e.kld_mean = e.kld_p99 = e.kld_max = e.top1 = 0.5;
    qc_measured m = {
        .evaluation = &e, .fallbacks = 0.5, .size_bytes = 0.5, .seconds = 0.5, .peak_rss_bytes = 0.5};
    for (size_t i = 0; i < sizeof largest / sizeof largest[0]; i++) {
        ck_assert_int_eq(qc_gate_check(largest[i], 0.5, NULL), QC_OK);
        ck_assert_msg(qc_gate_judge(largest[i], 0.5, &m).pass && qc_gate_judge(largest[i], 0.6, &m).pass,
                      "%s", largest[i]);
        ck_assert_msg(!qc_gate_judge(largest[i], 0.4, &m).pass, "%s", largest[i]);
        ck_assert(qc_gate_judge(largest[i], 0.4, &m).value == 0.5);
    }
    ck_assert(qc_gate_judge("top1", 0.5, &m).pass && qc_gate_judge("top1", 0.4, &m).pass &&
              !qc_gate_judge("top1", 0.6, &m).pass);
}
END_TEST

START_TEST(what_was_not_measured_never_passes)
{
    qc_evaluation e;
    qc_evaluation_init(&e);
    qc_measured m = {.evaluation = &e, .fallbacks = NAN};
    ck_assert(!qc_gate_judge("kld_mean", 1e9, &m).pass && !qc_gate_judge("top1", -1, &m).pass);
    ck_assert(!qc_gate_judge("fallbacks", 1e9, &m).pass);
    m.evaluation = NULL;
    ck_assert(!qc_gate_judge("ppl", 1e9, &m).pass && isnan(qc_gate_judge("ppl", 1e9, &m).value));
    qc_err err;
    ck_assert_int_eq(qc_gate_check("kld_meen", 1, &err), QC_E_USAGE);
    ck_assert(strstr(err.msg, "kld_meen") && strstr(err.msg, "kld_mean, kld_p99"));
    ck_assert_int_eq(qc_gate_check("ppl", NAN, &err), QC_E_USAGE);
    ck_assert_int_eq(qc_gate_check("ppl", INFINITY, &err), QC_E_USAGE);
    ck_assert_int_eq(qc_gate_check("top1", 93, &err), QC_E_USAGE);
    ck_assert_ptr_nonnull(strstr(err.msg, "93 is no fraction"));
    ck_assert_int_eq(qc_gate_check("top1", 1, &err), QC_OK);
}
END_TEST

START_TEST(a_failed_allocation_is_no_gap)
{
    setup();
    for (long nth = 1; nth < 40; nth += 3) {
        qc_alloc_fail_at(nth);
        cJSON *doc = qc_report_document(&input);
        qc_alloc_fail_at(0);
        ck_assert_ptr_null(doc);
    }
    teardown();
}
END_TEST

START_TEST(peak_memory_is_measured)
{
    uint64_t before = qc_peak_rss_bytes();
    ck_assert_uint_gt(before, 100000);
    size_t n = 64 << 20;
    char *p = qc_alloc(n, 1);
    memset(p, 1, n);
    ck_assert_uint_ge(qc_peak_rss_bytes(), before + n - (1 << 20));
    qc_free(p);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"report_has_the_keys_of_version_1", report_has_the_keys_of_version_1},
        {"manifest_names_no_place", manifest_names_no_place},
        {"gates_know_their_direction", gates_know_their_direction},
        {"what_was_not_measured_never_passes", what_was_not_measured_never_passes},
        {"a_failed_allocation_is_no_gap", a_failed_allocation_is_no_gap},
        {"peak_memory_is_measured", peak_memory_is_measured},
        {0},
    };
    return run_tests("report", cases);
}
