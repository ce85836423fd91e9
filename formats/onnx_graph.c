/* The graph of a decoder. A value is called after what makes it ("layers.3.q_proj"), an initializer by the
 * name of the model's tensor or of its part. */
#include "onnx_write.h"

#include "onnx_file.h"
#include "onnx_proto.h"
#include "onnx_set.h"
#include "qc_alloc.h"
#include "qc_map.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NAME_BYTES 160

typedef char name[NAME_BYTES];

typedef struct graph {
    const qc_onnx_model *model;
    const qc_engine_contents *contents;
    qc_map *by_name; /* tensors of the contents */
    qc_map *placed;  /* names of the initializers so far; keys in name_store */
    char **kept;     /* [n_kept] owned names behind `placed` */
    int64_t n_kept, cap_kept;
    qc_proto nodes, initializers, inputs, outputs;
    int rc; /* the first failure that is none of a message */
    qc_err *err;
} graph;

typedef struct attribute {
    const char *name;
    int type; /* QC_ATTRIBUTE_IS_FLOAT, QC_ATTRIBUTE_IS_INT */
    int64_t i;
    float f;
} attribute;

#define INT(n, x)                                                                                            \
    {                                                                                                        \
        (n), QC_ATTRIBUTE_IS_INT, (x), 0                                                                     \
    }
#define REAL(n, x)                                                                                           \
    {                                                                                                        \
        (n), QC_ATTRIBUTE_IS_FLOAT, 0, (float)(x)                                                            \
    }
#define ATTRIBUTES(...)                                                                                      \
    (const attribute[]){__VA_ARGS__}, (int)(sizeof((const attribute[]){__VA_ARGS__}) / sizeof(attribute))
#define NAMES(...)                                                                                           \
    (const char *const[])                                                                                    \
    {                                                                                                        \
        __VA_ARGS__, NULL                                                                                    \
    }

static void QC_PRINTF(2, 3) format(name ret, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(ret, NAME_BYTES, fmt, args);
    va_end(args);
}

/* ---- nodes ---- */

static void put_attribute(qc_proto *node, const attribute *a, qc_err *err)
{
    qc_proto p = {.err = err};
    qc_proto_text(&p, QC_ATTRIBUTE_NAME, a->name);
    if (a->type == QC_ATTRIBUTE_IS_FLOAT)
        qc_proto_float(&p, QC_ATTRIBUTE_F, a->f);
    else
        qc_proto_int(&p, QC_ATTRIBUTE_I, a->i);
    qc_proto_int(&p, QC_ATTRIBUTE_TYPE, a->type);
    qc_proto_message(node, QC_NODE_ATTRIBUTE, &p);
}

/* inputs, outputs: NULL behind the last name, "" for one that is left out. */
static void put_node(graph *g, const char *domain, const char *op, const char *const *inputs,
                     const char *const *outputs, const attribute *attributes, int n_attributes)
{
    qc_proto p = {.err = g->err};
    for (int i = 0; inputs[i]; i++)
        qc_proto_text(&p, QC_NODE_INPUT, inputs[i]);
    for (int i = 0; outputs[i]; i++)
        qc_proto_text(&p, QC_NODE_OUTPUT, outputs[i]);
    qc_proto_text(&p, QC_NODE_NAME, outputs[0]);
    qc_proto_text(&p, QC_NODE_OP, op);
    for (int i = 0; i < n_attributes; i++)
        put_attribute(&p, &attributes[i], g->err);
    if (*domain)
        qc_proto_text(&p, QC_NODE_DOMAIN, domain);
    qc_proto_message(&g->nodes, QC_GRAPH_NODE, &p);
}

/* ---- initializers ---- */

static int onnx_type(qc_dtype dtype)
{
    switch (dtype) {
    case QC_DT_F16:
        return QC_ONNX_FLOAT16;
    case QC_DT_BF16:
        return QC_ONNX_BFLOAT16;
    case QC_DT_U8:
        return QC_ONNX_UINT8;
    default:
        return QC_ONNX_FLOAT; /* hold approves no other */
    }
}

/* True if the name is new. */
static bool is_new(graph *g, const char *initializer)
{
    if (g->rc < 0 || qc_map_get(g->placed, initializer, strlen(initializer), -1) >= 0)
        return false;
    char *copy = qc_strdup(initializer);
    if (copy && g->n_kept < g->cap_kept && qc_map_add(g->placed, copy, strlen(copy), 0) == 1) {
        g->kept[g->n_kept++] = copy;
        return true;
    }
    qc_free(copy);
    g->rc = qc_fail_nomem(g->err, initializer, strlen(initializer));
    return false;
}

static void put_entry(qc_proto *p, int field, const char *key, const char *value, qc_err *err)
{
    qc_proto entry = {.err = err};
    qc_proto_text(&entry, QC_ENTRY_KEY, key);
    qc_proto_text(&entry, QC_ENTRY_VALUE, value);
    qc_proto_message(p, field, &entry);
}

/* An initializer whose data lie at the place of `part`, once. */
static void put_external(graph *g, const char *initializer, const char *part, int n_dims, const int64_t *dims)
{
    qc_proto p = {.err = g->err};
    char offset[24], length[24];
    if (!is_new(g, initializer))
        return;
    const qc_part_entry *place = qc_onnx_set_find(g->contents->set, part);
    if (!place) {
        g->rc = qc_fail(g->err, QC_E_INPUT, "ONNX: the graph needs a tensor %s, the model has none", part);
        return;
    }
    for (int i = 0; i < n_dims; i++)
        qc_proto_int(&p, QC_TENSOR_DIM, dims[i]);
    qc_proto_int(&p, QC_TENSOR_TYPE, onnx_type(place->dtype));
    qc_proto_text(&p, QC_TENSOR_NAME, initializer);
    snprintf(offset, sizeof offset, "%llu", (unsigned long long)place->offset);
    snprintf(length, sizeof length, "%llu", (unsigned long long)place->n_bytes);
    put_entry(&p, QC_TENSOR_EXTERNAL, "location", QC_ONNX_DATA_FILE, g->err);
    put_entry(&p, QC_TENSOR_EXTERNAL, "offset", offset, g->err);
    put_entry(&p, QC_TENSOR_EXTERNAL, "length", length, g->err);
    qc_proto_int(&p, QC_TENSOR_LOCATION, QC_ONNX_EXTERNAL);
    qc_proto_message(&g->initializers, QC_GRAPH_INITIALIZER, &p);
}

/* A small tensor of integers; n_dims 0 (one value) or 1. */
static void put_const(graph *g, const char *initializer, int n_dims, int64_t n_values, const int64_t *values)
{
    qc_proto p = {.err = g->err};
    if (n_dims)
        qc_proto_int(&p, QC_TENSOR_DIM, n_values);
    qc_proto_int(&p, QC_TENSOR_TYPE, QC_ONNX_INT64);
    qc_proto_text(&p, QC_TENSOR_NAME, initializer);
    qc_proto_bytes(&p, QC_TENSOR_RAW, values, (size_t)n_values * sizeof *values);
    qc_proto_message(&g->initializers, QC_GRAPH_INITIALIZER, &p);
}

static const qc_tensor_info *tensor(const graph *g, const char *tensor_name)
{
    int64_t i = qc_map_get(g->by_name, tensor_name, strlen(tensor_name), -1);
    return i < 0 ? NULL : &g->contents->tensors[i];
}

/* A tensor of the model that must be there, with its own shape. */
static void put_tensor(graph *g, const char *tensor_name)
{
    const qc_tensor_info *info = tensor(g, tensor_name);
    put_external(g, tensor_name, tensor_name, info ? info->n_dims : 0, info ? info->shape : NULL);
}

/* ---- matrices ---- */

/* Scales and zero points of MODULE.weight; *ret_zero = "" if its grid has none. */
static void put_grid(graph *g, const char *module, const qc_tensor_info *info, name ret_scale, name ret_zero)
{
    qc_part parts[QC_MAX_PARTS];
    int n = qc_packing_onnx.parts(info, parts);
    format(ret_scale, "%s.%s", module, parts[1].suffix);
    put_external(g, ret_scale, ret_scale, 2, parts[1].shape);
    *ret_zero = 0;
    if (n < 3)
        return;
    format(ret_zero, "%s.%s", module, parts[2].suffix);
    put_external(g, ret_zero, ret_zero, 2, parts[2].shape);
}

/* MODULE.weight in float32, whatever it is stored as. */
static void put_values(graph *g, const char *module, const qc_tensor_info *info, name ret)
{
    name stored;
    format(stored, "%s.weight", module);
    put_tensor(g, stored);
    format(ret, "%s", stored);
    if (info && info->dtype == QC_DT_F32)
        return;
    format(ret, "%s.weight.f32", module);
    if (qc_map_get(g->placed, ret, strlen(ret), -1) < 0 && is_new(g, ret))
        put_node(g, "", "Cast", NAMES(stored), NAMES(ret), ATTRIBUTES(INT("to", QC_ONNX_FLOAT)));
}

/* out = x W^T of MODULE.weight; `use` names the matrix, which is MODULE itself but for a tied head. */
static void put_product(graph *g, const char *module, const char *use, const char *x, const char *out)
{
    name weight, packed, part, scale, zero;
    format(weight, "%s.weight", module);
    const qc_tensor_info *info = tensor(g, weight);
    if (!info || info->dtype != QC_DT_GRID) {
        put_values(g, module, info, weight);
        put_node(g, QC_ONNX_CONTRIB, "FusedMatMul", NAMES(x, weight), NAMES(out),
                 ATTRIBUTES(INT("transB", 1)));
        return;
    }
    int64_t rows = qc_tensor_rows(info), cols = qc_tensor_cols(info), groups = qc_tensor_n_groups(info);
    format(packed, "%s.weight_packed", use);
    format(part, "%s.weight_packed", module);
    put_external(g, packed, part, 3,
                 (const int64_t[]){rows, groups, info->grid.group_elems * info->grid.bits / 8});
    put_grid(g, module, info, scale, zero);
    put_node(g, QC_ONNX_CONTRIB, "MatMulNBits", NAMES(x, packed, scale, *zero ? zero : NULL), NAMES(out),
             ATTRIBUTES(INT("K", cols), INT("N", rows), INT("bits", info->grid.bits),
                        INT("block_size", info->grid.group_elems)));
}

/* out = x W^T + b of PREFIX.MODULE; the bias where there is one. */
static void put_linear(graph *g, const char *module, const char *x, const char *out)
{
    name bias, product;
    format(bias, "%s.bias", module);
    if (!tensor(g, bias)) {
        put_product(g, module, module, x, out);
        return;
    }
    format(product, "%s.product", out);
    put_product(g, module, module, x, product);
    put_tensor(g, bias);
    put_node(g, "", "Add", NAMES(product, bias), NAMES(out), NULL, 0);
}

/* out = rows of the table of embeddings. */
static void put_embedding(graph *g, const char *module, const char *out)
{
    name stored, rows, packed, scale, zero;
    format(stored, "%s.weight", module);
    const qc_tensor_info *info = tensor(g, stored);
    if (info && info->dtype == QC_DT_GRID) {
        qc_part parts[QC_MAX_PARTS];
        qc_packing_onnx.parts(info, parts);
        format(packed, "%s.weight_packed", module);
        put_external(g, packed, packed, 2, parts[0].shape);
        put_grid(g, module, info, scale, zero);
        put_node(g, QC_ONNX_CONTRIB, "GatherBlockQuantized",
                 NAMES(packed, "input_ids", scale, *zero ? zero : NULL), NAMES(out),
                 ATTRIBUTES(INT("bits", info->grid.bits), INT("block_size", info->grid.group_elems),
                            INT("gather_axis", 0), INT("quantize_axis", 1)));
        return;
    }
    put_tensor(g, stored);
    bool whole = info && info->dtype == QC_DT_F32;
    format(rows, "%s.stored", out);
    put_node(g, "", "Gather", NAMES(stored, "input_ids"), NAMES(whole ? out : rows),
             ATTRIBUTES(INT("axis", 0)));
    if (!whole)
        put_node(g, "", "Cast", NAMES(rows), NAMES(out), ATTRIBUTES(INT("to", QC_ONNX_FLOAT)));
}

/* ---- layers ---- */

static void put_norm(graph *g, const char *weight, const char *x, const char *out)
{
    put_tensor(g, weight);
    put_node(g, "", "SimplifiedLayerNormalization", NAMES(x, weight), NAMES(out),
             ATTRIBUTES(INT("axis", -1), REAL("epsilon", g->model->eps), INT("stash_type", 1)));
}

/* sum = x + residual, out = its norm. */
static void put_skip_norm(graph *g, const char *weight, const char *x, const char *residual, const char *out,
                          const char *sum)
{
    put_tensor(g, weight);
    put_node(g, QC_ONNX_CONTRIB, "SkipSimplifiedLayerNormalization", NAMES(residual, x, weight),
             NAMES(out, "", "", sum), ATTRIBUTES(REAL("epsilon", g->model->eps)));
}

/* Each head normed alone. */
static void put_head_norm(graph *g, const char *weight, const char *x, const char *out)
{
    name heads, normed;
    format(heads, "%s.heads", out);
    format(normed, "%s.heads_normed", out);
    put_node(g, "", "Reshape", NAMES(x, QC_ONNX_CONST "heads"), NAMES(heads), NULL, 0);
    put_norm(g, weight, heads, normed);
    put_node(g, "", "Reshape", NAMES(normed, QC_ONNX_CONST "joined"), NAMES(out), NULL, 0);
}

/* One of q, k, v: its projection, and the norm of its heads. */
static void put_heads(graph *g, int64_t layer, const char *which, bool norm, const char *x, name out)
{
    name module, plain, weight;
    format(module, "model.layers.%lld.self_attn.%s_proj", (long long)layer, which);
    format(out, "layers.%lld.%s", (long long)layer, which);
    format(plain, "layers.%lld.%s_proj", (long long)layer, which);
    put_linear(g, module, x, norm ? plain : out);
    if (!norm)
        return;
    format(weight, "model.layers.%lld.self_attn.%s_norm.weight", (long long)layer, which);
    put_head_norm(g, weight, plain, out);
}

static void put_attention(graph *g, int64_t i, const char *x, const char *out)
{
    const qc_onnx_model *m = g->model;
    name q, k, v, past_k, past_v, present_k, present_v;
    put_heads(g, i, "q", m->qk_norm, x, q);
    put_heads(g, i, "k", m->qk_norm, x, k);
    put_heads(g, i, "v", false, x, v);
    format(past_k, "past_key_values.%lld.key", (long long)i);
    format(past_v, "past_key_values.%lld.value", (long long)i);
    format(present_k, "present.%lld.key", (long long)i);
    format(present_v, "present.%lld.value", (long long)i);
    bool slides = m->slides && m->slides[i];
    put_node(g, QC_ONNX_CONTRIB, "GroupQueryAttention",
             NAMES(q, k, v, past_k, past_v, "seqlens_k", "total_sequence_length", QC_ONNX_ROTARY "cos",
                   QC_ONNX_ROTARY "sin"),
             NAMES(out, present_k, present_v),
             ATTRIBUTES(INT("num_heads", m->n_heads), INT("kv_num_heads", m->n_kv_heads),
                        REAL("scale", m->attention_scale), INT("local_window_size", slides ? m->window : -1),
                        INT("do_rotary", 1), INT("rotary_interleaved", 0)));
}

static void put_mlp(graph *g, int64_t i, const char *x, const char *out)
{
    static const char *const modules[] = {"gate", "up", "down"};
    name full[3], gate, up, sigmoid, silu, product;
    for (int k = 0; k < 3; k++)
        format(full[k], "model.layers.%lld.mlp.%s_proj", (long long)i, modules[k]);
    format(gate, "layers.%lld.gate", (long long)i);
    format(up, "layers.%lld.up", (long long)i);
    format(sigmoid, "layers.%lld.sigmoid", (long long)i);
    format(silu, "layers.%lld.silu", (long long)i);
    format(product, "layers.%lld.gated", (long long)i);
    put_linear(g, full[0], x, gate);
    put_linear(g, full[1], x, up);
    put_node(g, "", "Sigmoid", NAMES(gate), NAMES(sigmoid), NULL, 0);
    put_node(g, "", "Mul", NAMES(gate, sigmoid), NAMES(silu), NULL, 0);
    put_node(g, "", "Mul", NAMES(silu, up), NAMES(product), NULL, 0);
    put_linear(g, full[2], product, out);
}

/* x: what the layer before adds to the residual stream; both names become those behind this layer. */
static void put_layer(graph *g, int64_t i, name x, name residual)
{
    name weight, normed, sum, attention, o, o_module, mlp;
    format(weight, "model.layers.%lld.input_layernorm.weight", (long long)i);
    format(normed, "layers.%lld.attention_norm", (long long)i);
    format(sum, "layers.%lld.stream", (long long)i);
    if (i == 0) {
        put_norm(g, weight, x, normed);
        format(residual, "%s", x);
    } else {
        put_skip_norm(g, weight, x, residual, normed, sum);
        format(residual, "%s", sum);
    }
    format(attention, "layers.%lld.attention", (long long)i);
    put_attention(g, i, normed, attention);
    format(o_module, "model.layers.%lld.self_attn.o_proj", (long long)i);
    format(o, "layers.%lld.o_proj", (long long)i);
    put_linear(g, o_module, attention, o);
    format(weight, "model.layers.%lld.post_attention_layernorm.weight", (long long)i);
    format(normed, "layers.%lld.mlp_norm", (long long)i);
    format(sum, "layers.%lld.mlp_stream", (long long)i);
    put_skip_norm(g, weight, o, residual, normed, sum);
    format(mlp, "layers.%lld.down_proj", (long long)i);
    put_mlp(g, i, normed, mlp);
    format(residual, "%s", sum);
    format(x, "%s", mlp);
}

/* ---- whole ---- */

typedef struct dim {
    const char *symbol; /* NULL: value */
    int64_t value;
} dim;

static void put_value(graph *g, qc_proto *to, int field, const char *value_name, int type, const dim *dims,
                      int n_dims)
{
    qc_proto value = {.err = g->err}, type_proto = {.err = g->err}, tensor_type = {.err = g->err},
             shape = {.err = g->err};
    for (int i = 0; i < n_dims; i++) {
        qc_proto d = {.err = g->err};
        if (dims[i].symbol)
            qc_proto_text(&d, QC_DIM_PARAM, dims[i].symbol);
        else
            qc_proto_int(&d, QC_DIM_VALUE, dims[i].value);
        qc_proto_message(&shape, QC_SHAPE_DIM, &d);
    }
    qc_proto_int(&tensor_type, QC_TENSOR_TYPE_ELEM, type);
    qc_proto_message(&tensor_type, QC_TENSOR_TYPE_SHAPE, &shape);
    qc_proto_message(&type_proto, QC_TYPE_TENSOR, &tensor_type);
    qc_proto_text(&value, QC_VALUE_NAME, value_name);
    qc_proto_message(&value, QC_VALUE_TYPE, &type_proto);
    qc_proto_message(to, field, &value);
}

static void put_signature(graph *g)
{
    const qc_onnx_model *m = g->model;
    static const char *const kinds[] = {"key", "value"};
    const dim ids[] = {{"batch_size", 0}, {"sequence_length", 0}},
              mask[] = {{"batch_size", 0}, {"total_sequence_length", 0}},
              logits[] = {{"batch_size", 0}, {"sequence_length", 0}, {NULL, m->vocab}},
              past[] = {{"batch_size", 0},
                        {NULL, m->n_kv_heads},
                        {"past_sequence_length", 0},
                        {NULL, m->head_dim}},
              present[] = {{"batch_size", 0},
                           {NULL, m->n_kv_heads},
                           {"total_sequence_length", 0},
                           {NULL, m->head_dim}};
    put_value(g, &g->inputs, QC_GRAPH_INPUT, "input_ids", QC_ONNX_INT64, ids, 2);
    put_value(g, &g->inputs, QC_GRAPH_INPUT, "attention_mask", QC_ONNX_INT64, mask, 2);
    put_value(g, &g->outputs, QC_GRAPH_OUTPUT, "logits", QC_ONNX_FLOAT, logits, 3);
    for (int64_t i = 0; i < m->n_layers; i++)
        for (int k = 0; k < 2; k++) {
            name in, out;
            format(in, "past_key_values.%lld.%s", (long long)i, kinds[k]);
            format(out, "present.%lld.%s", (long long)i, kinds[k]);
            put_value(g, &g->inputs, QC_GRAPH_INPUT, in, QC_ONNX_FLOAT, past, 4);
            put_value(g, &g->outputs, QC_GRAPH_OUTPUT, out, QC_ONNX_FLOAT, present, 4);
        }
}

/* Lengths as GroupQueryAttention wants them: of each row less one, and of the longest. */
static void put_lengths(graph *g)
{
    const int64_t one = 1, heads[] = {0, 0, -1, g->model->head_dim}, joined[] = {0, 0, -1};
    put_const(g, QC_ONNX_CONST "axis_1", 1, 1, &one);
    put_const(g, QC_ONNX_CONST "one", 0, 1, &one);
    if (g->model->qk_norm) {
        put_const(g, QC_ONNX_CONST "heads", 1, 4, heads);
        put_const(g, QC_ONNX_CONST "joined", 1, 3, joined);
    }
    put_node(g, "", "ReduceSum", NAMES("attention_mask", QC_ONNX_CONST "axis_1"), NAMES("row_lengths"),
             ATTRIBUTES(INT("keepdims", 0)));
    put_node(g, "", "Sub", NAMES("row_lengths", QC_ONNX_CONST "one"), NAMES("row_ends"), NULL, 0);
    put_node(g, "", "Cast", NAMES("row_ends"), NAMES("seqlens_k"), ATTRIBUTES(INT("to", QC_ONNX_INT32)));
    put_node(g, "", "Shape", NAMES("attention_mask"), NAMES("mask_shape"), NULL, 0);
    put_node(g, "", "Gather", NAMES("mask_shape", QC_ONNX_CONST "one"), NAMES("mask_length"),
             ATTRIBUTES(INT("axis", 0)));
    put_node(g, "", "Cast", NAMES("mask_length"), NAMES("total_sequence_length"),
             ATTRIBUTES(INT("to", QC_ONNX_INT32)));
    const int64_t table[] = {g->model->n_positions, g->model->head_dim / 2};
    put_external(g, QC_ONNX_ROTARY "cos", QC_ONNX_ROTARY "cos", 2, table);
    put_external(g, QC_ONNX_ROTARY "sin", QC_ONNX_ROTARY "sin", 2, table);
}

static void put_all(graph *g)
{
    name x = "embedding", residual, normed = "final_norm";
    put_signature(g);
    put_lengths(g);
    /* a tied table is stored under one of its two names */
    bool other = g->contents->tied && tensor(g, "lm_head.weight");
    const char *table = other ? "lm_head" : "model.embed_tokens";
    put_embedding(g, table, x);
    for (int64_t i = 0; i < g->model->n_layers && g->rc == QC_OK; i++)
        put_layer(g, i, x, residual);
    put_tensor(g, "model.norm.weight");
    put_node(g, QC_ONNX_CONTRIB, "SkipSimplifiedLayerNormalization", NAMES(residual, x, "model.norm.weight"),
             NAMES(normed), ATTRIBUTES(REAL("epsilon", g->model->eps)));
    /* the packed table has another shape as a head: a second name for the same bytes */
    put_product(g, g->contents->tied ? table : "lm_head", g->contents->tied ? "tied_head" : "lm_head", normed,
                "logits");
}

static void put_opset(qc_proto *model, const char *domain, int64_t version, qc_err *err)
{
    qc_proto p = {.err = err};
    qc_proto_text(&p, QC_OPSET_DOMAIN, domain);
    qc_proto_int(&p, QC_OPSET_VERSION, version);
    qc_proto_message(model, QC_MODEL_OPSET, &p);
}

static void append(qc_proto *to, qc_proto *from)
{
    if (to->rc == QC_OK)
        to->rc = from->rc;
    if (to->rc == QC_OK && from->buf.n_bytes)
        to->rc = qc_buf_append(&to->buf, from->buf.data, from->buf.n_bytes, to->err);
    qc_buf_clear(&from->buf);
}

static int finish(graph *g, qc_buf *ret)
{
    qc_proto model = {.err = g->err}, body = {.err = g->err};
    append(&body, &g->nodes);
    qc_proto_text(&body, QC_GRAPH_NAME, "decoder");
    append(&body, &g->initializers);
    append(&body, &g->inputs);
    append(&body, &g->outputs);
    qc_proto_int(&model, QC_MODEL_IR_VERSION, QC_ONNX_IR_VERSION);
    qc_proto_text(&model, QC_MODEL_PRODUCER, "qconvert");
    qc_proto_message(&model, QC_MODEL_GRAPH, &body);
    put_opset(&model, "", QC_ONNX_OPSET, g->err);
    put_opset(&model, QC_ONNX_CONTRIB, QC_ONNX_CONTRIB_OPSET, g->err);
    put_entry(&model, QC_MODEL_METADATA, QC_ONNX_LAYOUT_KEY, QC_ONNX_LAYOUT, g->err);
    int rc = g->rc < 0 ? g->rc : model.rc;
    if (rc == QC_OK)
        *ret = model.buf;
    else
        qc_buf_clear(&model.buf);
    return rc;
}

/* Room for the names of all initializers: at most three parts of a tensor, a value in float32, tables. */
static int open_graph(graph *g, qc_err *err)
{
    const qc_engine_contents *c = g->contents;
    g->cap_kept = 4 * c->n_tensors + 16;
    g->by_name = qc_map_new((size_t)c->n_tensors);
    g->placed = qc_map_new((size_t)g->cap_kept);
    g->kept = qc_calloc((size_t)g->cap_kept, sizeof *g->kept);
    if (!g->by_name || !g->placed || !g->kept)
        return qc_fail_nomem(err, QC_ONNX_GRAPH_FILE, (size_t)g->cap_kept * sizeof *g->kept);
    for (int64_t i = 0; i < c->n_tensors; i++)
        if (qc_map_add(g->by_name, c->tensors[i].name, strlen(c->tensors[i].name), i) < 0)
            return qc_fail_nomem(err, QC_ONNX_GRAPH_FILE, (size_t)c->n_tensors);
    return QC_OK;
}

int qc_onnx_graph_make(const qc_onnx_model *model, const qc_engine_contents *contents, qc_buf *ret,
                       qc_err *err)
{
    const qc_proto empty = {.err = err};
    graph g = {.model = model,
               .contents = contents,
               .nodes = empty,
               .initializers = empty,
               .inputs = empty,
               .outputs = empty,
               .err = err};
    g.rc = open_graph(&g, err);
    if (g.rc == QC_OK)
        put_all(&g);
    int rc = finish(&g, ret);
    for (int64_t i = 0; i < g.n_kept; i++)
        qc_free(g.kept[i]);
    qc_free(g.kept);
    qc_map_free(g.placed);
    qc_map_free(g.by_name);
    return rc;
}
