#include "onnx_read.h"

#include "onnx_file.h"
#include "onnx_proto.h"
#include "packing.h"
#include "qc_alloc.h"

#include <stdio.h>
#include <string.h>

enum { MAX_NAME_BYTES = 255, MAX_NODE_NAMES = 16 };

/* Sides of a matrix: products of a few of them fit 63 bits. */
#define MAX_SIDE (INT64_C(1) << 28)

typedef char name[MAX_NAME_BYTES + 1];

typedef struct parser {
    const char *path;
    uint64_t data_bytes;
    qc_onnx_graph *graph;
    qc_proto_reader body; /* of the graph */
    bool has_graph, layout, opset, contrib;
    qc_err *err;
} parser;

static int broken(const parser *p, const char *what)
{
    return qc_fail(p->err, QC_E_INPUT, "%s: %s is no message of ONNX", p->path, what);
}

/* A string without NULs. */
static int take_name(const parser *p, const qc_proto_field *f, name ret)
{
    if (f->wire != QC_WIRE_BYTES || f->n_bytes > MAX_NAME_BYTES || memchr(f->data, 0, f->n_bytes))
        return qc_fail(p->err, QC_E_INPUT, "%s: a name is no text of at most %d bytes", p->path,
                       MAX_NAME_BYTES);
    memcpy(ret, f->data, f->n_bytes);
    ret[f->n_bytes] = 0;
    return QC_OK;
}

/* key and value of two fields that are text. */
static int take_pair(const parser *p, const qc_proto_field *entry, name key, name value)
{
    qc_proto_reader r = {entry->data, entry->n_bytes};
    qc_proto_field f;
    int more;
    *key = *value = 0;
    if (entry->wire != QC_WIRE_BYTES)
        return broken(p, "an entry");
    while ((more = qc_proto_next(&r, &f)) > 0) {
        if (f.number == QC_ENTRY_KEY)
            QC_TRY(take_name(p, &f, key));
        else if (f.number == QC_ENTRY_VALUE && f.n_bytes <= MAX_NAME_BYTES)
            QC_TRY(take_name(p, &f, value));
    }
    return more < 0 ? broken(p, "an entry") : QC_OK;
}

static bool ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && strcmp(s + n - m, suffix) == 0;
}

/* ---- initializers ---- */

typedef struct initializer {
    name name;
    int64_t type;
    int n_dims;
    int64_t dims[QC_MAX_DIMS];
    bool external, inside; /* data in the data file, in the message */
    name location;
    uint64_t offset, length;
} initializer;

/* Digits of a number below 2^63. */
static bool take_number(const char *text, uint64_t *ret)
{
    uint64_t x = 0;
    size_t n = strlen(text);
    if (n == 0 || n > 18)
        return false;
    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        x = 10 * x + (uint64_t)(text[i] - '0');
    }
    *ret = x;
    return true;
}

static int take_external(const parser *p, const qc_proto_field *f, initializer *t)
{
    name key, value;
    QC_TRY(take_pair(p, f, key, value));
    bool ok = true;
    if (strcmp(key, "location") == 0)
        memcpy(t->location, value, sizeof t->location);
    else if (strcmp(key, "offset") == 0)
        ok = take_number(value, &t->offset);
    else if (strcmp(key, "length") == 0)
        ok = take_number(value, &t->length);
    return ok ? QC_OK
              : qc_fail(p->err, QC_E_INPUT, "%s: %s of external data is '%.40s', expected a number", p->path,
                        key, value);
}

static int take_initializer(const parser *p, const qc_proto_field *field, initializer *t)
{
    qc_proto_reader r = {field->data, field->n_bytes};
    qc_proto_field f;
    int more;
    *t = (initializer){.n_dims = 0};
    if (field->wire != QC_WIRE_BYTES)
        return broken(p, "an initializer");
    while ((more = qc_proto_next(&r, &f)) > 0) {
        if (f.number == QC_TENSOR_DIM) {
            if (f.wire != QC_WIRE_VARINT || t->n_dims == QC_MAX_DIMS || f.value > (uint64_t)MAX_SIDE)
                return qc_fail(p->err, QC_E_INPUT,
                               "%s: initializer \"%s\": more than %d dimensions, or one above 2^28", p->path,
                               t->name, QC_MAX_DIMS);
            t->dims[t->n_dims++] = (int64_t)f.value;
        } else if (f.number == QC_TENSOR_TYPE && f.wire == QC_WIRE_VARINT) {
            t->type = (int64_t)f.value;
        } else if (f.number == QC_TENSOR_NAME) {
            QC_TRY(take_name(p, &f, t->name));
        } else if (f.number == QC_TENSOR_RAW) {
            t->inside = true;
        } else if (f.number == QC_TENSOR_EXTERNAL) {
            QC_TRY(take_external(p, &f, t));
        } else if (f.number == QC_TENSOR_LOCATION) {
            t->external = f.wire == QC_WIRE_VARINT && f.value == QC_ONNX_EXTERNAL;
        }
    }
    return more < 0 ? broken(p, "an initializer") : QC_OK;
}

static bool dtype_of(int64_t type, qc_dtype *ret)
{
    static const struct {
        int type;
        qc_dtype dtype;
    } table[] = {{QC_ONNX_FLOAT, QC_DT_F32},
                 {QC_ONNX_UINT8, QC_DT_U8},
                 {QC_ONNX_FLOAT16, QC_DT_F16},
                 {QC_ONNX_BFLOAT16, QC_DT_BF16}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (table[i].type == type) {
            *ret = table[i].dtype;
            return true;
        }
    return false;
}

/* Bytes of the dimensions; false if they are more than a file of data_bytes can hold. */
static bool bytes_of(const initializer *t, qc_dtype dtype, uint64_t data_bytes, uint64_t *ret)
{
    uint64_t n = (uint64_t)qc_dtype_bits(dtype) / 8;
    for (int i = 0; i < t->n_dims; i++) {
        n *= (uint64_t)t->dims[i]; /* both below 2^34 and 2^28 */
        if (n > data_bytes || n >> 34)
            return false;
    }
    *ret = n;
    return true;
}

static int keep_tensor(parser *p, const initializer *t, qc_dtype dtype)
{
    qc_onnx_graph *g = p->graph;
    if (g->n_tensors == g->cap_tensors) {
        int64_t cap = 2 * g->cap_tensors + 256;
        void *list = qc_realloc(g->tensors, (size_t)g->cap_tensors * sizeof *g->tensors,
                                (size_t)cap * sizeof *g->tensors);
        if (!list)
            return qc_fail_nomem(p->err, p->path, (size_t)cap * sizeof *g->tensors);
        g->tensors = list;
        g->cap_tensors = cap;
    }
    qc_onnx_tensor *kept = &g->tensors[g->n_tensors];
    *kept = (qc_onnx_tensor){.offset = t->offset};
    kept->info = (qc_tensor_info){
        .name = qc_strdup(t->name), .dtype = dtype, .n_dims = t->n_dims, .n_bytes = t->length};
    memcpy(kept->info.shape, t->dims, sizeof kept->info.shape);
    if (!kept->info.name)
        return qc_fail_nomem(p->err, p->path, strlen(t->name));
    int added = qc_map_add(g->by_name, kept->info.name, strlen(t->name), g->n_tensors++);
    if (added < 0)
        return qc_fail_nomem(p->err, p->path, strlen(t->name));
    return added ? QC_OK
                 : qc_fail(p->err, QC_E_INPUT, "%s: initializer \"%s\" is there twice", p->path, t->name);
}

static int add_initializer(parser *p, const qc_proto_field *field)
{
    initializer t;
    qc_dtype dtype;
    uint64_t want;
    QC_TRY(take_initializer(p, field, &t));
    if (t.inside && !t.external && strncmp(t.name, QC_ONNX_CONST, strlen(QC_ONNX_CONST)) == 0)
        return QC_OK;
    if (!t.external || strcmp(t.location, QC_ONNX_DATA_FILE) != 0)
        return qc_fail(p->err, QC_E_UNSUPPORTED, "%s: initializer \"%s\" is not in %s", p->path, t.name,
                       QC_ONNX_DATA_FILE);
    if (!dtype_of(t.type, &dtype))
        return qc_fail(p->err, QC_E_UNSUPPORTED,
                       "%s: initializer \"%s\" has type %lld, expected FLOAT, FLOAT16, BFLOAT16 or UINT8",
                       p->path, t.name, (long long)t.type);
    if (!bytes_of(&t, dtype, p->data_bytes, &want) || want != t.length || t.offset > p->data_bytes ||
        t.length > p->data_bytes - t.offset)
        return qc_fail(
            p->err, QC_E_INPUT,
            "%s: initializer \"%s\": %llu bytes at %llu do not fit its dimensions or the %llu bytes "
            "of %s",
            p->path, t.name, (unsigned long long)t.length, (unsigned long long)t.offset,
            (unsigned long long)p->data_bytes, QC_ONNX_DATA_FILE);
    return keep_tensor(p, &t, dtype);
}

/* ---- nodes ---- */

typedef struct node_text {
    name op, domain;
    name inputs[MAX_NODE_NAMES];
    int n_inputs;
    int64_t k, n, bits, block_size, trans_b, gather_axis, quantize_axis; /* attributes; -1 = absent */
} node_text;

static int take_attribute(const parser *p, const qc_proto_field *field, node_text *node)
{
    qc_proto_reader r = {field->data, field->n_bytes};
    qc_proto_field f;
    name key = "";
    int64_t value = -1;
    int more;
    const struct {
        const char *key;
        int64_t *ret;
    } table[] = {{"K", &node->k},
                 {"N", &node->n},
                 {"bits", &node->bits},
                 {"block_size", &node->block_size},
                 {"transB", &node->trans_b},
                 {"gather_axis", &node->gather_axis},
                 {"quantize_axis", &node->quantize_axis}};
    if (field->wire != QC_WIRE_BYTES)
        return broken(p, "an attribute");
    while ((more = qc_proto_next(&r, &f)) > 0) {
        if (f.number == QC_ATTRIBUTE_NAME)
            QC_TRY(take_name(p, &f, key));
        else if (f.number == QC_ATTRIBUTE_I && f.wire == QC_WIRE_VARINT && f.value <= (uint64_t)MAX_SIDE)
            value = (int64_t)f.value;
    }
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strcmp(table[i].key, key) == 0)
            *table[i].ret = value;
    return more < 0 ? broken(p, "an attribute") : QC_OK;
}

static int take_node(const parser *p, const qc_proto_field *field, node_text *ret)
{
    qc_proto_reader r = {field->data, field->n_bytes};
    qc_proto_field f;
    int more;
    ret->n_inputs = 0;
    *ret->op = *ret->domain = 0;
    ret->k = ret->n = ret->bits = ret->block_size = ret->trans_b = ret->gather_axis = ret->quantize_axis = -1;
    if (field->wire != QC_WIRE_BYTES)
        return broken(p, "a node");
    while ((more = qc_proto_next(&r, &f)) > 0) {
        if (f.number == QC_NODE_INPUT && ret->n_inputs == MAX_NODE_NAMES)
            return broken(p, "a node with more than 16 inputs");
        if (f.number == QC_NODE_INPUT)
            QC_TRY(take_name(p, &f, ret->inputs[ret->n_inputs++]));
        else if (f.number == QC_NODE_OP)
            QC_TRY(take_name(p, &f, ret->op));
        else if (f.number == QC_NODE_DOMAIN)
            QC_TRY(take_name(p, &f, ret->domain));
        else if (f.number == QC_NODE_ATTRIBUTE)
            QC_TRY(take_attribute(p, &f, ret));
    }
    return more < 0 ? broken(p, "a node") : QC_OK;
}

static int64_t find(const parser *p, const char *tensor)
{
    return qc_map_get(p->graph->by_name, tensor, strlen(tensor), -1);
}

/* Part of a matrix: the tensor is there, of this type and as many bytes. */
static int find_part(const parser *p, const char *tensor, qc_dtype dtype, uint64_t n_bytes, int64_t *ret)
{
    *ret = find(p, tensor);
    const qc_tensor_info *info = *ret < 0 ? NULL : &p->graph->tensors[*ret].info;
    if (info && info->dtype == dtype && info->n_bytes == n_bytes)
        return QC_OK;
    return qc_fail(p->err, QC_E_INPUT, "%s: a node expects an initializer \"%s\" of %s and %llu bytes",
                   p->path, tensor, qc_dtype_name(dtype), (unsigned long long)n_bytes);
}

static int keep_matrix(parser *p, const qc_onnx_matrix *m, const char *module)
{
    qc_onnx_graph *g = p->graph;
    if (g->n_matrices == g->cap_matrices) {
        int64_t cap = 2 * g->cap_matrices + 256;
        void *list = qc_realloc(g->matrices, (size_t)g->cap_matrices * sizeof *g->matrices,
                                (size_t)cap * sizeof *g->matrices);
        if (!list)
            return qc_fail_nomem(p->err, p->path, (size_t)cap * sizeof *g->matrices);
        g->matrices = list;
        g->cap_matrices = cap;
    }
    char *weight = qc_asprintf("%s.weight", module);
    if (!weight)
        return qc_fail_nomem(p->err, p->path, strlen(module));
    int64_t at = qc_map_get(g->matrix_of, weight, strlen(weight), -1);
    if (at >= 0) { /* a table that is the head, too */
        const qc_onnx_matrix *have = &g->matrices[at];
        bool same = memcmp(have->info.shape, m->info.shape, sizeof m->info.shape) == 0 &&
                    have->info.grid.bits == m->info.grid.bits && have->zero == m->zero &&
                    have->info.grid.group_elems == m->info.grid.group_elems;
        int rc =
            same ? QC_OK : qc_fail(p->err, QC_E_INPUT, "%s: nodes see \"%s\" on two grids", p->path, weight);
        qc_free(weight);
        return rc;
    }
    qc_onnx_matrix *kept = &g->matrices[g->n_matrices];
    *kept = *m;
    kept->info.name = weight;
    g->tensors[m->packed].claimed = g->tensors[m->scale].claimed = true;
    if (m->zero >= 0)
        g->tensors[m->zero].claimed = true;
    if (qc_map_add(g->matrix_of, weight, strlen(weight), g->n_matrices++) < 0)
        return qc_fail_nomem(p->err, p->path, strlen(weight));
    return QC_OK;
}

/* A node that reads a matrix on a grid: packed, scale and, unless it is symmetric, zero. */
static int add_matrix(parser *p, const node_text *node, const char *packed, const char *scale,
                      const char *zero)
{
    static const char end[] = ".weight_scale";
    name module, own;
    size_t stem = strlen(scale) - strlen(end);
    bool block =
        node->block_size >= 16 && node->block_size <= 256 && (node->block_size & (node->block_size - 1)) == 0;
    if (!ends_with(scale, end) || (node->bits != 4 && node->bits != 8) || !block || node->k < 1 ||
        node->k % node->block_size || node->n < 1)
        return qc_fail(
            p->err, QC_E_INPUT,
            "%s: %s with \"%s\": K %lld, N %lld, bits %lld, block_size %lld: expected 4 or 8 bits and "
            "blocks of 16 to 256 that divide K",
            p->path, node->op, packed, (long long)node->k, (long long)node->n, (long long)node->bits,
            (long long)node->block_size);
    snprintf(module, sizeof module, "%.*s", (int)stem, scale);
    qc_onnx_matrix m = {.zero = -1};
    m.info = (qc_tensor_info){.dtype = QC_DT_GRID, .n_dims = 2, .shape = {node->n, node->k}};
    m.info.grid = (qc_grid){.kind = QC_GRID_AFFINE,
                            .bits = (int)node->bits,
                            .symmetric = !*zero,
                            .group_elems = node->block_size,
                            .scale_dtype = QC_DT_F32};
    qc_part parts[QC_MAX_PARTS];
    int n = qc_packing_onnx.parts(&m.info, parts);
    for (int i = 0; i < n; i++)
        m.info.n_bytes += qc_part_bytes(&parts[i]);
    QC_TRY(find_part(p, packed, QC_DT_U8, qc_part_bytes(&parts[0]), &m.packed));
    QC_TRY(find_part(p, scale, QC_DT_F32, qc_part_bytes(&parts[1]), &m.scale));
    if (*zero)
        QC_TRY(find_part(p, zero, QC_DT_U8, qc_part_bytes(&parts[2]), &m.zero));
    /* another name of the same bytes stands for the module's own */
    int64_t other = m.packed;
    if ((size_t)snprintf(own, sizeof own, "%s.weight_packed", module) >= sizeof own)
        return broken(p, "a long name");
    QC_TRY(find_part(p, own, QC_DT_U8, qc_part_bytes(&parts[0]), &m.packed));
    if (p->graph->tensors[other].offset != p->graph->tensors[m.packed].offset)
        return qc_fail(p->err, QC_E_INPUT, "%s: \"%s\" is read with the scales of \"%s\"", p->path, packed,
                       module);
    p->graph->tensors[other].claimed = true;
    return keep_matrix(p, &m, module);
}

static int add_node(parser *p, const qc_proto_field *field, node_text *node)
{
    static const char *const known[] = {"Add",
                                        "Cast",
                                        "Gather",
                                        "GroupQueryAttention",
                                        "Mul",
                                        "ReduceSum",
                                        "Reshape",
                                        "Shape",
                                        "Sigmoid",
                                        "SimplifiedLayerNormalization",
                                        "SkipSimplifiedLayerNormalization",
                                        "Sub"};
    QC_TRY(take_node(p, field, node));
    if (strcmp(node->op, "MatMulNBits") == 0 && (node->n_inputs == 3 || node->n_inputs == 4))
        return add_matrix(p, node, node->inputs[1], node->inputs[2],
                          node->n_inputs == 4 ? node->inputs[3] : "");
    if (strcmp(node->op, "GatherBlockQuantized") == 0 && (node->n_inputs == 3 || node->n_inputs == 4) &&
        node->gather_axis == 0 && node->quantize_axis == 1 && (node->bits == 4 || node->bits == 8)) {
        int64_t table = find(p, node->inputs[0]);
        const qc_tensor_info *info = table < 0 ? NULL : &p->graph->tensors[table].info;
        if (info && info->n_dims == 2) {
            node->n = info->shape[0];
            node->k = info->shape[1] * 8 / node->bits;
        }
        return add_matrix(p, node, node->inputs[0], node->inputs[2],
                          node->n_inputs == 4 ? node->inputs[3] : "");
    }
    if (strcmp(node->op, "FusedMatMul") == 0 && node->trans_b == 1)
        return QC_OK;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(node->op, known[i]) == 0)
            return QC_OK;
    return qc_fail(p->err, QC_E_UNSUPPORTED,
                   "%s: node %.60s with these inputs or attributes is none of the layout", p->path, node->op);
}

/* ---- whole ---- */

static int take_opset(parser *p, const qc_proto_field *field)
{
    qc_proto_reader r = {field->data, field->n_bytes};
    qc_proto_field f;
    name domain = "";
    uint64_t version = 0;
    int more;
    if (field->wire != QC_WIRE_BYTES)
        return broken(p, "an opset");
    while ((more = qc_proto_next(&r, &f)) > 0) {
        if (f.number == QC_OPSET_DOMAIN)
            QC_TRY(take_name(p, &f, domain));
        else if (f.number == QC_OPSET_VERSION && f.wire == QC_WIRE_VARINT)
            version = f.value;
    }
    p->opset = p->opset || (!*domain && version == QC_ONNX_OPSET);
    p->contrib = p->contrib || (strcmp(domain, QC_ONNX_CONTRIB) == 0 && version == QC_ONNX_CONTRIB_OPSET);
    return more < 0 ? broken(p, "an opset") : QC_OK;
}

static int take_metadata(parser *p, const qc_proto_field *field)
{
    name key, value;
    QC_TRY(take_pair(p, field, key, value));
    p->layout = p->layout || (strcmp(key, QC_ONNX_LAYOUT_KEY) == 0 && strcmp(value, QC_ONNX_LAYOUT) == 0);
    return QC_OK;
}

static int parse_model(parser *p, const void *data, size_t n_bytes)
{
    qc_proto_reader r = {data, n_bytes};
    qc_proto_field f;
    int more;
    while ((more = qc_proto_next(&r, &f)) > 0) {
        if (f.number == QC_MODEL_GRAPH && f.wire == QC_WIRE_BYTES && !p->has_graph) {
            p->body = (qc_proto_reader){f.data, f.n_bytes};
            p->has_graph = true;
        } else if (f.number == QC_MODEL_GRAPH) {
            return broken(p, "a second graph");
        } else if (f.number == QC_MODEL_OPSET) {
            QC_TRY(take_opset(p, &f));
        } else if (f.number == QC_MODEL_METADATA) {
            QC_TRY(take_metadata(p, &f));
        }
    }
    if (more < 0 || !p->has_graph)
        return broken(p, "the file");
    if (!p->layout || !p->opset || !p->contrib)
        return qc_fail(p->err, QC_E_UNSUPPORTED,
                       "%s: not a graph that qconvert wrote (metadata " QC_ONNX_LAYOUT_KEY " " QC_ONNX_LAYOUT
                       ", opset %d, " QC_ONNX_CONTRIB " %d): other ONNX models are not read",
                       p->path, QC_ONNX_OPSET, QC_ONNX_CONTRIB_OPSET);
    return QC_OK;
}

/* All fields of the graph of this number: nodes or initializers. */
static int parse_fields(parser *p, int field, node_text *node)
{
    qc_proto_reader r = p->body;
    qc_proto_field f;
    int more;
    while ((more = qc_proto_next(&r, &f)) > 0)
        if (f.number == field)
            QC_TRY(field == QC_GRAPH_NODE ? add_node(p, &f, node) : add_initializer(p, &f));
    return more < 0 ? broken(p, "the graph") : QC_OK;
}

/* Initializers first, whatever their place: nodes refer to them. */
static int parse_graph(parser *p)
{
    node_text *node = qc_alloc(1, sizeof *node);
    if (!node)
        return qc_fail_nomem(p->err, p->path, sizeof *node);
    int rc = parse_fields(p, QC_GRAPH_INITIALIZER, node);
    if (rc == QC_OK)
        rc = parse_fields(p, QC_GRAPH_NODE, node);
    qc_free(node);
    return rc;
}

/* What is part of no matrix must be a tensor of the model, or a table of the graph's own. */
static int check_rest(const parser *p)
{
    for (int64_t i = 0; i < p->graph->n_tensors; i++) {
        const qc_onnx_tensor *t = &p->graph->tensors[i];
        bool own = strncmp(t->info.name, QC_ONNX_ROTARY, strlen(QC_ONNX_ROTARY)) == 0;
        bool dense = (ends_with(t->info.name, ".weight") || ends_with(t->info.name, ".bias")) &&
                     t->info.dtype != QC_DT_U8;
        if (!t->claimed && !own && !dense)
            return qc_fail(p->err, QC_E_INPUT, "%s: no node reads initializer \"%s\"", p->path, t->info.name);
    }
    return QC_OK;
}

int qc_onnx_parse(const void *data, size_t n_bytes, uint64_t data_bytes, const char *path, qc_onnx_graph *ret,
                  qc_err *err)
{
    qc_onnx_graph graph = {.by_name = qc_map_new(1024), .matrix_of = qc_map_new(1024)};
    parser p = {.path = path, .data_bytes = data_bytes, .graph = &graph, .err = err};
    int rc =
        graph.by_name && graph.matrix_of ? parse_model(&p, data, n_bytes) : qc_fail_nomem(err, path, 1024);
    if (rc == QC_OK)
        rc = parse_graph(&p);
    if (rc == QC_OK)
        rc = check_rest(&p);
    if (rc == QC_OK)
        *ret = graph;
    else
        qc_onnx_clear(&graph);
    return rc;
}

void qc_onnx_clear(qc_onnx_graph *g)
{
    if (!g)
        return;
    for (int64_t i = 0; i < g->n_tensors; i++)
        qc_free((char *)(uintptr_t)g->tensors[i].info.name);
    for (int64_t i = 0; i < g->n_matrices; i++)
        qc_free((char *)(uintptr_t)g->matrices[i].info.name);
    qc_free(g->tensors);
    qc_free(g->matrices);
    qc_map_free(g->by_name);
    qc_map_free(g->matrix_of);
    *g = (qc_onnx_graph){0};
}
