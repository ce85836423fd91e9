/* What an ONNX folder can hold, and its files beside the tensors. */
#include "onnx_write.h"

#include "onnx_file.h"
#include "onnx_set.h"
#include "qc_alloc.h"
#include "qc_json.h"
#include "qc_math.h"

#include <string.h>

/* ---- what is stored how ---- */

/* Blocks that MatMulNBits and GatherBlockQuantized take. */
static bool is_block(int64_t group)
{
    return group >= 16 && group <= 256 && (group & (group - 1)) == 0;
}

/* The largest block up to 128 that divides the width; 0: none does. */
static int64_t block_of(int64_t cols)
{
    for (int64_t block = 128; block >= 16; block /= 2)
        if (cols % block == 0)
            return block;
    return 0;
}

/* A CPU computes in float32: vectors, which are small, are stored so. Matrices keep their 16 bits and are
 * converted when the model is loaded. */
static void hold_values(const qc_tensor_use *use, qc_tensor_info *info)
{
    bool half = use->source == QC_DT_F16 || use->source == QC_DT_BF16;
    if (use->kind == QC_KIND_VECTOR)
        info->dtype = QC_DT_F32;
    else if (half)
        info->dtype = use->source;
    else
        info->dtype = use->source == QC_DT_GRID ? QC_DT_BF16 : QC_DT_F32;
    info->grid = (qc_grid){0};
}

static int onnx_hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                     qc_err *err)
{
    qc_grid *g = &info->grid;
    int64_t cols = qc_tensor_cols(info);
    (void)type;
    if (info->dtype != QC_DT_GRID || use->kind == QC_KIND_VECTOR) {
        hold_values(use, info);
        return QC_OK;
    }
    bool table = use->kind != QC_KIND_LINEAR, whole_row = g->group_elems >= cols;
    if (table && whole_row && !is_block(g->group_elems)) { /* what recipes say of tables by default */
        if (!block_of(cols)) {
            *ret_why = "left in 16 bit: no block of 16 to 128 columns divides its width";
            hold_values(use, info);
            return QC_OK;
        }
        g->group_elems = block_of(cols);
        *ret_why = "a scale for each block: ONNX Runtime has none for a whole row";
    }
    if (g->kind != QC_GRID_AFFINE || (g->bits != 4 && g->bits != 8) || !is_block(g->group_elems) ||
        cols % g->group_elems)
        return qc_fail(
            err, QC_E_UNSUPPORTED,
            "tensor %s: onnx can not hold INT%d with group %lld, expected 4 or 8 bits and a group of "
            "16, 32, 64, 128 or 256 that divides the width of %lld",
            info->name, g->bits, (long long)g->group_elems, (long long)cols);
    return QC_OK;
}

static uint64_t onnx_bytes(const char *type, const qc_tensor_info *info)
{
    (void)type;
    if (info->dtype != QC_DT_GRID)
        return (uint64_t)qc_tensor_n_elems(info) * (uint64_t)qc_dtype_bits(info->dtype) / 8;
    qc_part parts[QC_MAX_PARTS];
    uint64_t n_bytes = 0;
    for (int i = qc_packing_onnx.parts(info, parts) - 1; i >= 0; i--)
        n_bytes += qc_part_bytes(&parts[i]);
    return n_bytes;
}

static const qc_packing *onnx_packing(const qc_schemes *schemes, const qc_tensor_info *info)
{
    (void)schemes;
    (void)info;
    return &qc_packing_onnx;
}

/* config.json is the source's: the graph says how matrices are packed. What the matrices ask for together is
 * known here. */
static int onnx_config(const qc_schemes *schemes, cJSON **ret, qc_err *err)
{
    *ret = NULL;
    for (int i = 0; i < schemes->n_schemes; i++)
        if (schemes->schemes[i].act_bits)
            return qc_fail(err, QC_E_UNSUPPORTED, "onnx: the graph quantizes no activations");
    return QC_OK;
}

/* ---- rotary tables ---- */

static int write_tables(const qc_onnx_model *model, const qc_engine_contents *c, qc_err *err)
{
    int64_t half = model->head_dim / 2;
    size_t n = (size_t)(model->n_positions * half);
    double *inv_freq = qc_alloc((size_t)half, sizeof *inv_freq);
    float *tables = qc_alloc(2 * n, sizeof *tables);
    int rc = inv_freq && tables ? QC_OK : qc_fail_nomem(err, "rotary tables", 2 * n * sizeof *tables);
    if (rc == QC_OK) {
        qc_rope_inv_freq(&model->rope, model->head_dim, model->n_positions, inv_freq);
        qc_rope_tables(&model->rope, model->head_dim, inv_freq, model->n_positions, tables, tables + n);
    }
    for (int i = 0; i < 2 && rc == QC_OK; i++)
        rc = c->set->write(c->set, c->n_parts + i, 0, tables + (size_t)i * n, n * sizeof *tables, err);
    qc_free(inv_freq);
    qc_free(tables);
    return rc;
}

static int onnx_own_tensors(const qc_engine_contents *c, bool write, qc_err *err)
{
    qc_onnx_model model;
    QC_TRY(qc_onnx_model_read(c->metas, &model, err));
    if (write)
        return write_tables(&model, c, err);
    const int64_t shape[] = {model.n_positions, model.head_dim / 2};
    QC_TRY(c->set->add(c->set, QC_ONNX_ROTARY "cos", QC_DT_F32, 2, shape, err));
    return c->set->add(c->set, QC_ONNX_ROTARY "sin", QC_DT_F32, 2, shape, err);
}

/* ---- genai_config.json ---- */

static void add_names(cJSON *to, const char *const (*names)[2], int n)
{
    for (int i = 0; i < n; i++)
        cJSON_AddStringToObject(to, names[i][0], names[i][1]);
}

static void add_decoder(cJSON *model, const qc_onnx_model *m)
{
    static const char *const inputs[][2] = {{"input_ids", "input_ids"},
                                            {"attention_mask", "attention_mask"},
                                            {"past_key_names", "past_key_values.%d.key"},
                                            {"past_value_names", "past_key_values.%d.value"}};
    static const char *const outputs[][2] = {{"logits", "logits"},
                                             {"present_key_names", "present.%d.key"},
                                             {"present_value_names", "present.%d.value"}};
    cJSON *decoder = cJSON_AddObjectToObject(model, "decoder"),
          *options = cJSON_AddObjectToObject(decoder, "session_options");
    cJSON_AddStringToObject(options, "log_id", "onnxruntime-genai");
    cJSON_AddArrayToObject(options, "provider_options");
    cJSON_AddStringToObject(decoder, "filename", QC_ONNX_GRAPH_FILE);
    cJSON_AddNumberToObject(decoder, "head_size", (double)m->head_dim);
    cJSON_AddNumberToObject(decoder, "hidden_size", (double)m->hidden);
    cJSON_AddNumberToObject(decoder, "num_attention_heads", (double)m->n_heads);
    cJSON_AddNumberToObject(decoder, "num_key_value_heads", (double)m->n_kv_heads);
    cJSON_AddNumberToObject(decoder, "num_hidden_layers", (double)m->n_layers);
    add_names(cJSON_AddObjectToObject(decoder, "inputs"), inputs, 4);
    add_names(cJSON_AddObjectToObject(decoder, "outputs"), outputs, 3);
}

/* Greedy search: what a model is compared with. Programs that sample set their own options. */
static void add_search(cJSON *doc, const qc_onnx_model *m)
{
    cJSON *search = cJSON_AddObjectToObject(doc, "search");
    cJSON_AddBoolToObject(search, "do_sample", false);
    cJSON_AddNumberToObject(search, "max_length", (double)m->n_positions);
    cJSON_AddNumberToObject(search, "min_length", 0);
    cJSON_AddNumberToObject(search, "num_beams", 1);
    cJSON_AddNumberToObject(search, "num_return_sequences", 1);
    cJSON_AddBoolToObject(search, "past_present_share_buffer", true);
    cJSON_AddNumberToObject(search, "repetition_penalty", 1);
    cJSON_AddNumberToObject(search, "temperature", 1);
    cJSON_AddNumberToObject(search, "top_k", 1);
    cJSON_AddNumberToObject(search, "top_p", 1);
}

static int make_genai(const qc_onnx_model *m, const qc_metas *metas, qc_buf *ret, qc_err *err)
{
    const qc_meta *eos = qc_metas_find(metas, "model.eos");
    int64_t bos = qc_metas_int(metas, "model.bos", -1);
    qc_json_watch();
    cJSON *doc = cJSON_CreateObject(), *model = cJSON_AddObjectToObject(doc, "model");
    cJSON_AddStringToObject(model, "type", m->family);
    if (bos >= 0)
        cJSON_AddNumberToObject(model, "bos_token_id", (double)bos);
    cJSON *ends = cJSON_AddArrayToObject(model, "eos_token_id");
    for (uint32_t i = 0; eos && i < eos->n_elems; i++)
        qc_json_add_item(ends, cJSON_CreateNumber((double)eos->array[i]));
    cJSON_AddNumberToObject(model, "pad_token_id", eos && eos->n_elems ? (double)eos->array[0] : 0);
    cJSON_AddNumberToObject(model, "context_length", (double)m->n_positions);
    cJSON_AddNumberToObject(model, "vocab_size", (double)m->vocab);
    add_decoder(model, m);
    add_search(doc, m);
    doc = qc_json_watched(doc);
    char *text = doc ? qc_json_print(doc) : NULL;
    cJSON_Delete(doc);
    int rc =
        text ? qc_buf_append(ret, text, strlen(text), err) : qc_fail_nomem(err, "genai_config.json", 4096);
    qc_free(text);
    return rc;
}

static int onnx_file(const qc_engine_contents *c, int i, const char **ret_name, qc_buf *ret, qc_err *err)
{
    static const char *const names[] = {QC_ONNX_GRAPH_FILE, "genai_config.json", NULL};
    qc_onnx_model model;
    *ret_name = names[i];
    if (!names[i])
        return QC_OK;
    QC_TRY(qc_onnx_model_read(c->metas, &model, err));
    return i == 0 ? qc_onnx_graph_make(&model, c, ret, err) : make_genai(&model, c->metas, ret, err);
}

/* ---- tables ---- */

const qc_engine_format qc_engine_onnx = {.title = "ONNX",
                                         .library = "onnxruntime-genai",
                                         .packs_tables = true,
                                         .new_set = qc_onnx_set_new,
                                         .packing = onnx_packing,
                                         .config = onnx_config,
                                         .own_tensors = onnx_own_tensors,
                                         .file = onnx_file};

static int onnx_create(const qc_writer_options *options, qc_writer **ret, qc_err *err)
{
    return qc_engine_writer_create(&qc_onnx_writer_format, &qc_engine_onnx, options, ret, err);
}

const qc_writer_format qc_onnx_writer_format = {
    .name = "onnx", .hold = onnx_hold, .tensor_bytes = onnx_bytes, .create = onnx_create};
