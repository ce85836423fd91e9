/* The schema of the report as one table: what is checked on reading, and docs/report.schema.json, are made
 * from it. */
#include "report.h"
#include "report_doc.h"

#include "qc_alloc.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef enum { TEXT, NUMBER, COUNT, BOOL, OBJECT, LIST, NUMBERS, NUMBER_MAP, ANYTHING } kind;

typedef struct field {
    const char *name; /* NULL ends a table */
    kind kind;
    enum { ALWAYS = 1, OR_NULL = 2 } flags; /* in every report of version 1; null where it was not measured */
    const struct field *sub;                /* of an OBJECT, of the elements of a LIST */
    const char *help;
} field;

#define SOME     0
#define NULLABLE (ALWAYS | OR_NULL)

static const field tool_fields[] = {
    {"name", TEXT, NULLABLE, NULL, "program"},
    {"version", TEXT, NULLABLE, NULL, "its version"},
    {"commit", TEXT, OR_NULL, NULL, "commit that it was built from"},
    {"kernels", TEXT, OR_NULL, NULL, "instruction sets in use"},
    {"compute", TEXT, NULLABLE, NULL, "arithmetic of matrix products: f32, bf16"},
    {"device", TEXT, OR_NULL, NULL, "where it ran: cpu, cuda:0"},
    {"device_detail", TEXT, OR_NULL, NULL, "driver, clock and memory of a device"},
    {0}};

static const field file_fields[] = {
    {"file", TEXT, NULLABLE, NULL, "path"}, {"sha256", TEXT, NULLABLE, NULL, "of its bytes"}, {0}};

static const field model_fields[] = {{"path", TEXT, NULLABLE, NULL, "folder or file"},
                                     {"family", TEXT, NULLABLE, NULL, "model_type of config.json"},
                                     {"layers", COUNT, ALWAYS, NULL, "decoder layers"},
                                     {"files", LIST, ALWAYS, file_fields, "files that may change a result"},
                                     {0}};

static const field calibration_fields[] = {
    {"statistics", TEXT, OR_NULL, NULL, "file with statistics made earlier"},
    {"statistics_sha256", TEXT, OR_NULL, NULL, "of that file"},
    {"compute", TEXT, OR_NULL, NULL, "arithmetic of the run that made it"},
    {"text", TEXT, OR_NULL, NULL, "text that was calibrated with"},
    {"windows", COUNT, OR_NULL, NULL, "windows of it"},
    {"length", COUNT, OR_NULL, NULL, "tokens per window"},
    {"tokens", COUNT, OR_NULL, NULL, "tokens used"},
    {"tokens_text", COUNT, OR_NULL, NULL, "tokens of the whole text"},
    {"documents", COUNT, OR_NULL, NULL, "documents of the text"},
    {"sample", TEXT, OR_NULL, NULL, "even, random"},
    {"seed", COUNT, OR_NULL, NULL, "of sample random"},
    {"plain_special", BOOL, OR_NULL, NULL, "special tokens in the text were ordinary text"},
    {"ids_sha256", TEXT, OR_NULL, NULL, "of the ids as little-endian uint32"},
    {"ppl", NUMBER, OR_NULL, NULL, "perplexity of the 16-bit model on the first windows"},
    {"ppl_windows", COUNT, OR_NULL, NULL, "how many"},
    {0}};

static const field tensor_fields[] = {
    {"name", TEXT, NULLABLE, NULL, "of the source"},
    {"action", TEXT, NULLABLE, NULL, "quantized, copied, kept16, tied, folded, dropped"},
    {"rule", TEXT, NULLABLE, NULL, "why"},
    {"layer", NUMBER, ALWAYS, NULL, "-1 outside the layers"},
    {"source_dtype", TEXT, NULLABLE, NULL, "type in the source"},
    {"rows", COUNT, ALWAYS, NULL, "outputs"},
    {"cols", COUNT, ALWAYS, NULL, "inputs"},
    {"bits", NUMBER, ALWAYS, NULL, "of a stored value, scales left out"},
    {"bytes_in", COUNT, ALWAYS, NULL, "in the source"},
    {"bytes_out", COUNT, ALWAYS, NULL, "in the artifact"},
    {"group", COUNT, SOME, NULL, "inputs that share a scale"},
    {"symmetric", BOOL, SOME, NULL, "grid without zero points"},
    {"searched", BOOL, SOME, NULL, "scales by the least squared error"},
    {"method", TEXT, OR_NULL, NULL, "how it was rounded"},
    {"relative_error", NUMBER, OR_NULL, NULL, "sum (w - w')^2 / sum w^2"},
    {"stored_error", NUMBER, OR_NULL, NULL,
     "sum (w - w')^2 / sum w^2 over the checkpoint's weights, of the codes that were written"},
    {"stored_error_read", NUMBER, OR_NULL, NULL, "the same of the bytes of the artifact, read back"},
    {"clipped", COUNT, SOME, NULL, "weights outside the grid"},
    {"clipped_fraction", NUMBER, OR_NULL, NULL, "share of them"},
    {"zero_groups", COUNT, SOME, NULL, "groups of zeros"},
    {"small_scales", COUNT, SOME, NULL, "groups whose scale was raised to the least that its type holds"},
    {"order", TEXT, OR_NULL, NULL, "of columns"},
    {"error", NUMBER, OR_NULL, NULL, "squared error of the outputs on the calibration text"},
    {"error_rtn", NUMBER, OR_NULL, NULL, "that of rounding to nearest on the same grid"},
    {"error_norm", NUMBER, OR_NULL, NULL, "that of leaving the matrix out"},
    {"damp", NUMBER, OR_NULL, NULL, "damping used"},
    {"dead_columns", COUNT, SOME, NULL, "inputs that were always 0"},
    {"tokens", COUNT, SOME, NULL, "that the statistics were taken from"},
    {"rtn_rows", COUNT, SOME, NULL, "rows where rounding to nearest was better"},
    {"seconds", NUMBER, OR_NULL, NULL, "wall time"},
    {0}};

static const field layer_fields[] = {
    {"layer", COUNT, ALWAYS, NULL, "from 0"},
    {"bytes_in", COUNT, ALWAYS, NULL, "in the source"},
    {"bytes_out", COUNT, ALWAYS, NULL, "in the artifact"},
    {"relative_error", NUMBER, NULLABLE, NULL, "of its quantized matrices together"},
    {"error", NUMBER, OR_NULL, NULL,
     "squared error of its matrices' outputs on the calibration text, together"},
    {"error_rtn", NUMBER, OR_NULL, NULL, "that of rounding to nearest on the same grids"},
    {"error_norm", NUMBER, OR_NULL, NULL, "that of leaving the matrices out"},
    {"seconds", NUMBER_MAP, SOME, NULL, "of a calibrated layer by kind of work"},
    {0}};

static const field event_fields[] = {{"kind", TEXT, NULLABLE, NULL, "what `allow` matches"},
                                     {"level", TEXT, NULLABLE, NULL, "fallback, note"},
                                     {"subject", TEXT, NULLABLE, NULL, "tensor, layer, file or key"},
                                     {"detail", TEXT, NULLABLE, NULL, "what was done"},
                                     {"count", COUNT, ALWAYS, NULL, "how often"},
                                     {0}};

static const field window_fields[] = {
    {"tokens", COUNT, SOME, NULL, "scored"},
    {"nll", NUMBER, NULLABLE, NULL, "mean over its tokens, nats"},
    {"nll_reference", NUMBER, NULLABLE, NULL, "the reference's"},
    {"kld", NUMBER, NULLABLE, NULL, "mean KL divergence, nats"},
    {"top1", NUMBER, NULLABLE, NULL, "share of tokens with the same top token"},
    {0}};

static const field place_fields[] = {
    {"first", COUNT, ALWAYS, NULL, "place in the window"},
    {"last", COUNT, ALWAYS, NULL, "place in the window, inclusive"},
    {"tokens", COUNT, ALWAYS, NULL, "scored"},
    {"nll", NUMBER, NULLABLE, NULL, "mean, nats"},
    {"nll_reference", NUMBER, NULLABLE, NULL, "the reference's"},
    {"kld", NUMBER, NULLABLE, NULL, "mean KL divergence, nats"},
    {"top1", NUMBER, NULLABLE, NULL, "share of positions with the same top token"},
    {0}};

static const field histogram_fields[] = {
    {"log10_from", NUMBER, ALWAYS, NULL,
     "where the first bin begins; it takes all that is smaller, the last all that is larger"},
    {"log10_step", NUMBER, ALWAYS, NULL, "width of a bin"},
    {"counts", NUMBERS, ALWAYS, NULL, "positions per bin"},
    {0}};

static const field decision_fields[] = {
    {"gate", TEXT, ALWAYS, NULL, "its name"},
    {"limit", NUMBER, NULLABLE, NULL, "the gate's"},
    {"value", NUMBER, NULLABLE, NULL, "mean over the windows at the last look"},
    {"statistic", NUMBER, NULLABLE, NULL,
     "distance from the limit over the standard error; positive: inside; null: no error"},
    {"boundary", NUMBER, NULLABLE, NULL, "decided where |statistic| reaches it"},
    {"windows", COUNT, ALWAYS, NULL, "at that look"},
    {"outcome", TEXT, ALWAYS, NULL, "pass, fail, undecided"},
    {0}};

static const field noise_fields[] = {
    {"windows", COUNT, ALWAYS, NULL, "that the reference was measured against itself on"},
    {"threads", COUNT, ALWAYS, NULL, "of the run"},
    {"other_threads", COUNT, ALWAYS, NULL, "of the other side"},
    {"threads_kld_max", NUMBER, NULLABLE, NULL, "largest KL divergence between the two; 0: the same bits"},
    {"compute", TEXT, ALWAYS, NULL, "arithmetic of the run"},
    {"other_compute", TEXT, ALWAYS, NULL, "of the other side, for the figures below"},
    {"kld_mean", NUMBER, NULLABLE, NULL, "mean KL divergence, nats"},
    {"kld_p99", NUMBER, NULLABLE, NULL, "99th percentile"},
    {"delta_nll", NUMBER, NULLABLE, NULL, "mean difference of the NLL"},
    {"top1", NUMBER, NULLABLE, NULL, "share of positions with the same top token"},
    {0}};

static const field evaluation_fields[] = {
    {"protocol", TEXT, NULLABLE, NULL, "how windows are cut and scored"},
    {"text", TEXT, NULLABLE, NULL, "what was scored"},
    {"windows", COUNT, ALWAYS, NULL, "scored"},
    {"length", COUNT, ALWAYS, NULL, "tokens per window"},
    {"reference", TEXT, SOME, NULL, "file of a stored reference, where one was compared with"},
    {"stride", COUNT, SOME, NULL, "tokens from one window's start to the next's"},
    {"bos", BOOL, SOME, NULL, "a BOS was put in front"},
    {"plain_special", BOOL, SOME, NULL, "special tokens in the text were ordinary text"},
    {"special_ids", COUNT, SOME, NULL, "special ids found in the text"},
    {"tokens_text", COUNT, SOME, NULL, "tokens of the whole text"},
    {"tokens_scored", COUNT, ALWAYS, NULL, "positions that the figures are means over"},
    {"text_sha256", TEXT, OR_NULL, NULL, "of the text's file"},
    {"ids_sha256", TEXT, NULLABLE, NULL, "of the scored ids as little-endian int32"},
    {"ppl", NUMBER, NULLABLE, NULL, "perplexity"},
    {"ppl_reference", NUMBER, NULLABLE, NULL, "the reference's"},
    {"ppl_ratio", NUMBER, NULLABLE, NULL, "ppl / ppl_reference"},
    {"delta_nll", NUMBER, NULLABLE, NULL, "ln ppl_ratio"},
    {"delta_nll_se", NUMBER, NULLABLE, NULL, "its standard error"},
    {"kld_mean", NUMBER, NULLABLE, NULL, "mean KL divergence, nats"},
    {"kld_p99", NUMBER, NULLABLE, NULL, "99th percentile"},
    {"kld_max", NUMBER, NULLABLE, NULL, "maximum"},
    {"top1", NUMBER, NULLABLE, NULL, "share of positions with the same top token"},
    {"ppl_se", NUMBER, OR_NULL, NULL, "standard error of ppl"},
    {"ppl_reference_se", NUMBER, OR_NULL, NULL, "of ppl_reference"},
    {"ppl_ratio_se", NUMBER, OR_NULL, NULL, "of ppl_ratio"},
    {"nll_correlation", NUMBER, OR_NULL, NULL, "of the NLL of both models over tokens"},
    {"delta_nll_low", NUMBER, OR_NULL, NULL, "95 % interval of delta_nll over windows"},
    {"delta_nll_high", NUMBER, OR_NULL, NULL, "its upper end"},
    {"kld_mean_se", NUMBER, OR_NULL, NULL, "standard error of kld_mean"},
    {"kld_mean_low", NUMBER, OR_NULL, NULL, "95 % interval of kld_mean over windows"},
    {"kld_mean_high", NUMBER, OR_NULL, NULL, "its upper end"},
    {"kld_percentiles", NUMBER_MAP, SOME, NULL, "p0 (least) to p100 (most)"},
    {"delta_p_mean", NUMBER, OR_NULL, NULL, "mean of p(true token) of the model minus that of the reference"},
    {"delta_p_mean_se", NUMBER, OR_NULL, NULL, "its standard error"},
    {"delta_p_percentiles", NUMBER_MAP, SOME, NULL, "p0 (least) to p100 (most)"},
    {"delta_p_rms", NUMBER, OR_NULL, NULL, "root of the mean square"},
    {"delta_p_rms_se", NUMBER, OR_NULL, NULL, "its standard error"},
    {"top1_se", NUMBER, OR_NULL, NULL, "standard error of top1"},
    {"flips", NUMBER, OR_NULL, NULL,
     "share of positions where one of the two alone has the true token on top"},
    {"flips_lost", NUMBER, OR_NULL, NULL, "the reference alone"},
    {"flips_won", NUMBER, OR_NULL, NULL, "the model alone"},
    {"noise_floor", OBJECT, SOME, noise_fields, "the reference against itself under other arithmetic"},
    {"decisions", LIST, SOME, decision_fields, "of gates, where windows were scored until they were decided"},
    {"per_place", LIST, SOME, place_fields, "means over ranges of places in a window"},
    {"kld_histogram", OBJECT, SOME, histogram_fields, "of all positions"},
    {"per_window", LIST, ALWAYS, window_fields, "the same per window"},
    {0}};

static const field gate_fields[] = {
    {"name", TEXT, NULLABLE, NULL, "figure that is limited"},
    {"limit", NUMBER, NULLABLE, NULL, "most (of top1: least) that is allowed"},
    {"value", NUMBER, NULLABLE, NULL, "what was measured"},
    {"pass", BOOL, ALWAYS, NULL, "whether it is within the limit"},
    {0}};

static const field artifact_fields[] = {
    {"format", TEXT, NULLABLE, NULL, "of the file"},
    {"path", TEXT, NULLABLE, NULL, "as it is called after the run"},
    {"bytes", COUNT, ALWAYS, NULL, "of the file, or of all files of a folder"},
    {"sha256", TEXT, NULLABLE, NULL, "of the file; null for a folder"},
    {"rejected", BOOL, ALWAYS, NULL, "a gate failed"},
    {"account_error", NUMBER, OR_NULL, NULL,
     "largest relative difference of a tensor's stored_error_read and stored_error"},
    {"tensors", LIST, SOME, tensor_fields, "of a further output"},
    {"evaluation", OBJECT, OR_NULL, evaluation_fields, "of a further output"},
    {"gates", LIST, SOME, gate_fields, "of a further output"},
    {0}};

static const field report_fields[] = {
    {"schema", TEXT, ALWAYS, NULL, "name and version of this schema"},
    {"tool", OBJECT, ALWAYS, tool_fields, "what made the report"},
    {"model", OBJECT, ALWAYS, model_fields, "what was quantized"},
    {"recipe", ANYTHING, ALWAYS, NULL, "every setting, defaults included (docs/recipe.md)"},
    {"plan", ANYTHING, ALWAYS, NULL, "what was foreseen"},
    {"calibration", OBJECT, NULLABLE, calibration_fields, "null without"},
    {"tensors", LIST, ALWAYS, tensor_fields, "of the first output, each tensor of the source once"},
    {"layers", LIST, ALWAYS, layer_fields, "of the first output"},
    {"events", LIST, ALWAYS, event_fields, "fallbacks and notes"},
    {"evaluation", OBJECT, NULLABLE, evaluation_fields,
     "of the first output; null where nothing was measured"},
    {"artifacts", LIST, ALWAYS, artifact_fields, "the outputs"},
    {"gates", LIST, ALWAYS, gate_fields, "of the first output"},
    {"timings", NUMBER_MAP, ALWAYS, NULL, "wall seconds per step"},
    {"peak_rss_bytes", NUMBER, NULLABLE, NULL, "most memory in use"},
    {"peak_device_bytes", NUMBER, OR_NULL, NULL, "the same of a device"},
    {0}};

/* ---- check ---- */

typedef struct checker {
    const char *name; /* of the file */
    char path[256];   /* of the value in the document */
    qc_err *err;
} checker;

static const char *const kind_names[] = {
    "a string", "a number",          "a whole number from 0", "true or false", "an object",
    "a list",   "a list of numbers", "an object of numbers",  "anything"};

static int wrong(const checker *c, const char *what)
{
    return qc_fail(c->err, QC_E_INPUT, "%s: %s: %s expected", c->name, c->path, what);
}

static int check_object(checker *c, const cJSON *object, const field *fields);

/* Append to the path; the returned length is what cuts it off again. */
static size_t descend(checker *c, const char *key, int index)
{
    size_t n = strlen(c->path), room = sizeof c->path - n;
    if (key)
        snprintf(c->path + n, room, "%s%s", n ? "." : "", key);
    else
        snprintf(c->path + n, room, "[%d]", index);
    return n;
}

static int check_elements(checker *c, const cJSON *list, const field *f)
{
    int i = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, list)
    {
        size_t n = descend(c, f->kind == NUMBER_MAP ? item->string : NULL, i++);
        if (f->kind == LIST && !cJSON_IsObject(item))
            return wrong(c, "an object");
        if (f->kind != LIST && !cJSON_IsNumber(item) && !cJSON_IsNull(item))
            return wrong(c, "a number");
        if (f->kind == LIST)
            QC_TRY(check_object(c, item, f->sub));
        c->path[n] = 0;
    }
    return QC_OK;
}

static bool fits(const cJSON *item, kind k)
{
    switch (k) {
    case TEXT:
        return cJSON_IsString(item);
    case NUMBER:
        return cJSON_IsNumber(item);
    case COUNT:
        return cJSON_IsNumber(item) && item->valuedouble >= 0 &&
               floor(item->valuedouble) == item->valuedouble;
    case BOOL:
        return cJSON_IsBool(item);
    case OBJECT:
    case NUMBER_MAP:
        return cJSON_IsObject(item);
    case LIST:
    case NUMBERS:
        return cJSON_IsArray(item);
    default:
        return true;
    }
}

static int check_value(checker *c, const cJSON *item, const field *f)
{
    if (cJSON_IsNull(item) && (f->flags & OR_NULL))
        return QC_OK;
    if (!fits(item, f->kind))
        return wrong(c, kind_names[f->kind]);
    if (f->kind == OBJECT)
        return check_object(c, item, f->sub);
    return f->kind == LIST || f->kind == NUMBERS || f->kind == NUMBER_MAP ? check_elements(c, item, f)
                                                                          : QC_OK;
}

/* Keys that the table does not name are those of a later program: passed over. */
static int check_object(checker *c, const cJSON *object, const field *fields)
{
    for (const field *f = fields; f->name; f++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, f->name);
        size_t n = descend(c, f->name, 0);
        if (item)
            QC_TRY(check_value(c, item, f));
        else if (f->flags & ALWAYS)
            return qc_fail(c->err, QC_E_INPUT, "%s: %s is missing", c->name, c->path);
        c->path[n] = 0;
    }
    return QC_OK;
}

/* "qconvert-report/N": version N, 0 for anything else. */
static int schema_version(const char *schema)
{
    static const char name[] = "qconvert-report/";
    size_t n = sizeof name - 1, digits;
    if (strncmp(schema, name, n) != 0)
        return 0;
    digits = strspn(schema + n, "0123456789");
    if (digits == 0 || schema[n + digits] || schema[n] == '0')
        return 0;
    return digits == 1 && schema[n] == '1' ? 1 : 2;
}

int qc_report_check(const cJSON *doc, const char *name, qc_err *err)
{
    checker c = {.name = name, .err = err};
    const char *schema = qc_report_string(doc, "schema");
    int version = cJSON_IsObject(doc) ? schema_version(schema) : 0;
    if (version == 0 && *schema)
        return qc_fail(err, QC_E_INPUT, "%s: of schema %.60s, a report (%s) was expected", name, schema,
                       QC_REPORT_SCHEMA);
    if (version == 0)
        return qc_fail(err, QC_E_INPUT, "%s: is no report: it has no \"schema\" (%s expected)", name,
                       QC_REPORT_SCHEMA);
    if (version > 1)
        return qc_fail(err, QC_E_UNSUPPORTED, "%s: of the newer schema %.60s, this program reads up to %s",
                       name, schema, QC_REPORT_SCHEMA);
    QC_TRY(check_object(&c, doc, report_fields));
    if (qc_report_n_parts(doc) == 0)
        return qc_fail(err, QC_E_INPUT, "%s: artifacts: is empty", name);
    return QC_OK;
}

/* ---- JSON Schema ---- */

static void add(cJSON *object, const char *key, cJSON *member)
{
    if (!cJSON_AddItemToObject(object, key, member))
        cJSON_Delete(member);
}

static void add_type(cJSON *out, const char *type, bool or_null)
{
    if (!or_null) {
        cJSON_AddStringToObject(out, "type", type);
        return;
    }
    cJSON *types = cJSON_AddArrayToObject(out, "type");
    qc_json_add_item(types, cJSON_CreateString(type));
    qc_json_add_item(types, cJSON_CreateString("null"));
}

static void add_object(cJSON *out, const field *fields)
{
    cJSON *properties = cJSON_AddObjectToObject(out, "properties");
    cJSON *required = cJSON_AddArrayToObject(out, "required");
    for (const field *f = fields; f->name; f++) {
        static const char *const types[] = {"string", "number", "integer", "boolean", "object",
                                            "array",  "array",  "object",  NULL};
        cJSON *item = cJSON_AddObjectToObject(properties, f->name);
        cJSON_AddStringToObject(item, "description", f->help);
        if (f->flags & ALWAYS)
            qc_json_add_item(required, cJSON_CreateString(f->name));
        if (types[f->kind])
            add_type(item, types[f->kind], f->flags & OR_NULL);
        if (f->kind == COUNT)
            cJSON_AddNumberToObject(item, "minimum", 0);
        cJSON *element =
            f->kind == LIST || f->kind == NUMBERS || f->kind == NUMBER_MAP ? cJSON_CreateObject() : NULL;
        if (f->kind == OBJECT)
            add_object(item, f->sub);
        else if (f->kind == LIST) {
            cJSON_AddStringToObject(element, "type", "object");
            add_object(element, f->sub);
        } else if (element)
            add_type(element, "number", true);
        if (element)
            add(item, f->kind == NUMBER_MAP ? "additionalProperties" : "items", element);
    }
}

cJSON *qc_report_schema(void)
{
    qc_json_watch();
    cJSON *out = cJSON_CreateObject();
    cJSON_AddStringToObject(out, "$schema", "https://json-schema.org/draft/2020-12/schema");
    cJSON_AddStringToObject(out, "title", QC_REPORT_SCHEMA);
    cJSON_AddStringToObject(out, "type", "object");
    add_object(out, report_fields);
    return qc_json_watched(out);
}
