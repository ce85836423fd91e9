#include "onnx.h"

#include "hf_layout.h"
#include "hf_quant_internal.h"
#include "onnx_file.h"
#include "onnx_read.h"
#include "qc_alloc.h"
#include "qc_file.h"

#include <assert.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A graph has some hundred bytes for each tensor. */
#define MAX_GRAPH_BYTES (256u << 20)

/* The tensors of the data file as they are stored; packed ones are put together by hf_quant.c. */
typedef struct onnx_source {
    qc_source base; /* first: a qc_source pointer is one to this struct */
    char *path;
    qc_hf_names files;
    qc_mapped map;
    qc_onnx_graph graph;
} onnx_source;

static const onnx_source *self(const qc_source *src)
{
    return (const onnx_source *)src;
}

static const qc_tensor_info *source_info(const qc_source *src, int64_t tensor)
{
    return &self(src)->graph.tensors[tensor].info;
}

static int64_t source_find(const qc_source *src, const char *name)
{
    return qc_map_get(self(src)->graph.by_name, name, strlen(name), -1);
}

static const void *source_raw(const qc_source *src, int64_t tensor)
{
    return self(src)->map.data + self(src)->graph.tensors[tensor].offset;
}

static uint64_t row_bytes(const qc_tensor_info *info)
{
    return (uint64_t)qc_tensor_cols(info) * (uint64_t)qc_dtype_bits(info->dtype) / 8;
}

static int source_read_rows(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                            qc_err *err)
{
    const qc_tensor_info *info = source_info(src, tensor);
    assert(row0 >= 0 && n_rows >= 0 && row0 + n_rows <= qc_tensor_rows(info));
    return qc_dense_to_f32(info->dtype,
                           (const uint8_t *)source_raw(src, tensor) + (uint64_t)row0 * row_bytes(info),
                           n_rows * qc_tensor_cols(info), dst, err);
}

static void source_release(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows)
{
    const qc_onnx_tensor *t = &self(src)->graph.tensors[tensor];
    uint64_t bytes = row_bytes(&t->info);
    qc_mapped_release_around(&self(src)->map, t->offset + (uint64_t)row0 * bytes, (uint64_t)n_rows * bytes);
}

static int source_side_file(const qc_source *src, const char *name, char **ret, size_t *ret_bytes,
                            qc_err *err)
{
    return qc_hf_side_file(self(src)->path, name, ret, ret_bytes, err);
}

static void source_close(qc_source *src)
{
    onnx_source *s = (onnx_source *)src;
    qc_onnx_clear(&s->graph);
    qc_file_unmap(&s->map);
    qc_hf_names_clear(&s->files);
    qc_free(s->path);
    qc_free(s);
}

/* ---- opening ---- */

static int add_file(onnx_source *s, const char *name, bool optional, qc_err *err)
{
    char *path = qc_path_join(s->path, name);
    if (!path)
        return qc_fail_nomem(err, s->path, strlen(name));
    int rc = optional && !qc_path_exists(path) ? QC_OK : qc_hf_names_add(&s->files, path, err);
    qc_free(path);
    return rc;
}

/* What a manifest hashes; the graph and its data come last. */
static int list_files(onnx_source *s, qc_err *err)
{
    static const char *const side[] = {"config.json", "generation_config.json", "tokenizer.json",
                                       "tokenizer_config.json", "genai_config.json"};
    for (size_t i = 0; i < sizeof side / sizeof side[0]; i++)
        QC_TRY(add_file(s, side[i], true, err));
    QC_TRY(add_file(s, QC_ONNX_GRAPH_FILE, false, err));
    QC_TRY(add_file(s, QC_ONNX_DATA_FILE, false, err));
    s->base.files = s->files.v;
    s->base.n_files = (int64_t)s->files.n;
    return QC_OK;
}

static int open_into(onnx_source *s, qc_err *err)
{
    char *text = NULL;
    size_t n_bytes = 0;
    QC_TRY(list_files(s, err));
    const char *graph = s->files.v[s->files.n - 2], *data = s->files.v[s->files.n - 1];
    QC_TRY(qc_file_read(graph, MAX_GRAPH_BYTES, &text, &n_bytes, err));
    int rc = qc_file_map(data, &s->map, err);
    if (rc == QC_OK)
        rc = qc_onnx_parse(text, n_bytes, s->map.n_bytes, graph, &s->graph, err);
    qc_free(text);
    s->base.n_tensors = s->graph.n_tensors;
    return rc;
}

/* The tensors of the model: what lies in the data file as it is, and the matrices on a grid. */
static int list_tensors(const onnx_source *s, qc_logical **ret, int64_t *ret_n, qc_err *err)
{
    const qc_onnx_graph *g = &s->graph;
    size_t n = 0;
    qc_logical *list = qc_calloc((size_t)(g->n_tensors + g->n_matrices) + 1, sizeof *list);
    if (!list)
        return qc_fail_nomem(err, s->path, (size_t)(g->n_tensors + g->n_matrices) * sizeof *list);
    for (int64_t i = 0; i < g->n_tensors; i++)
        if (!g->tensors[i].claimed &&
            strncmp(g->tensors[i].info.name, QC_ONNX_ROTARY, strlen(QC_ONNX_ROTARY)) != 0)
            list[n++] = (qc_logical){.info = g->tensors[i].info, .parts = {i, -1, -1, -1}};
    for (int64_t i = 0; i < g->n_matrices; i++) {
        const qc_onnx_matrix *m = &g->matrices[i];
        list[n++] = (qc_logical){.info = m->info,
                                 .packing = &qc_packing_onnx,
                                 .grid_info = m->info,
                                 .parts = {m->packed, m->scale, m->zero, -1}};
    }
    *ret = list;
    *ret_n = (int64_t)n;
    return QC_OK;
}

int qc_onnx_open(const char *path, qc_source **ret, qc_err *err)
{
    onnx_source *s = qc_calloc(1, sizeof *s);
    if (!s || !(s->path = qc_strdup(path))) {
        qc_free(s);
        return qc_fail_nomem(err, path, sizeof *s);
    }
    s->base = (qc_source){.format = "onnx",
                          .path = s->path,
                          .info = source_info,
                          .find = source_find,
                          .read_rows = source_read_rows,
                          .raw = source_raw,
                          .release = source_release,
                          .side_file = source_side_file,
                          .close = source_close};
    qc_logical *tensors = NULL;
    int64_t n = 0;
    int rc = open_into(s, err);
    if (rc == QC_OK)
        rc = list_tensors(s, &tensors, &n, err);
    if (rc == QC_OK)
        return qc_packed_source_open(&s->base, tensors, n, "onnx", NULL, ret, err);
    source_close(&s->base);
    return rc;
}

/* No heap: a probe has no way to say that memory is short. */
static bool holds(int folder, const char *name)
{
    struct stat st;
    return fstatat(folder, name, &st, AT_SYMLINK_NOFOLLOW) == 0;
}

bool qc_onnx_probe_path(const char *path)
{
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return false;
    bool hit = holds(folder, QC_ONNX_GRAPH_FILE) && !holds(folder, "model.safetensors") &&
               !holds(folder, QC_HF_INDEX);
    close(folder);
    return hit;
}
