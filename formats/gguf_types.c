/* Which block type a tensor of an output gets: types of the whole file, those of single matrices by their
 * bits, and what is taken instead where a row is no multiple of the block. */
#include "gguf_write.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

typedef enum { MIX_NONE = 0, MIX_K_M } mix;

/* A type of the file: of its matrices, and of the head (or the table that stands for it). */
typedef struct file_type {
    const char *name;
    int linear, head; /* ids */
    mix mix;
    int id; /* general.file_type */
} file_type;

static const file_type file_types[] = {
    {"q4_0", QC_BLOCK_Q4_0, QC_BLOCK_Q6_K, MIX_NONE, 2},
    {"q4_1", QC_BLOCK_Q4_1, QC_BLOCK_Q6_K, MIX_NONE, 3},
    {"q5_0", QC_BLOCK_Q5_0, QC_BLOCK_Q6_K, MIX_NONE, 8},
    {"q5_1", QC_BLOCK_Q5_1, QC_BLOCK_Q6_K, MIX_NONE, 9},
    {"q8_0", QC_BLOCK_Q8_0, QC_BLOCK_Q8_0, MIX_NONE, 7},
    {"q4_k", QC_BLOCK_Q4_K, QC_BLOCK_Q6_K, MIX_NONE, 14},
    {"q4_k_m", QC_BLOCK_Q4_K, QC_BLOCK_Q6_K, MIX_K_M, 15},
    {"q5_k", QC_BLOCK_Q5_K, QC_BLOCK_Q6_K, MIX_NONE, 16},
    {"q6_k", QC_BLOCK_Q6_K, QC_BLOCK_Q6_K, MIX_NONE, 18},
    {"f16", QC_BLOCK_F16, QC_BLOCK_F16, MIX_NONE, 1},
    {"bf16", QC_BLOCK_BF16, QC_BLOCK_BF16, MIX_NONE, 32},
    {"f32", QC_BLOCK_F32, QC_BLOCK_F32, MIX_NONE, 0},
};

/* Layers whose most sensitive matrices get more bits: the first and last eighth, and every third between. */
static bool gets_more(int layer, int n_layers)
{
    int eighth = n_layers / 8;
    return layer < eighth || layer >= 7 * n_layers / 8 || (layer - eighth) % 3 == 2;
}

static int type_in_mix(const file_type *ft, const qc_tensor_use *use, const char *name)
{
    bool sensitive = strstr(name, ".attn_v.") || strstr(name, ".ffn_down.");
    return ft->mix == MIX_K_M && sensitive && gets_more(use->layer, use->n_layers) ? QC_BLOCK_Q6_K
                                                                                   : ft->linear;
}

static const file_type *type_of(const char *name)
{
    for (size_t i = 0; name && i < sizeof file_types / sizeof file_types[0]; i++)
        if (strcasecmp(file_types[i].name, name) == 0)
            return &file_types[i];
    return NULL;
}

int qc_gguf_file_type(const char *type)
{
    const file_type *t = type_of(type);
    return t ? t->id : -1;
}

const qc_block_info *qc_gguf_block_of(const qc_tensor_info *info)
{
    if (info->dtype == QC_DT_GRID)
        return qc_block_by_grid(&info->grid);
    for (int i = 0; qc_block_at(i); i++)
        if (qc_block_at(i)->dtype == info->dtype && qc_block_at(i)->n_elems == 1)
            return qc_block_at(i);
    return NULL;
}

/* Without a type for the file: by what the recipe wants of this matrix. */
static int type_of_grid(const qc_tensor_info *info, qc_err *err)
{
    const qc_grid *g = &info->grid;
    const qc_block_info *same = qc_block_by_grid(g);
    if (same)
        return same->id;
    if (g->bits == 4)
        return g->symmetric ? QC_BLOCK_Q4_0 : QC_BLOCK_Q4_1;
    if (g->bits == 5)
        return g->symmetric ? QC_BLOCK_Q5_0 : QC_BLOCK_Q5_1;
    if (g->bits == 6 && g->symmetric)
        return QC_BLOCK_Q6_K;
    if (g->bits == 8 && g->symmetric)
        return QC_BLOCK_Q8_0;
    return qc_fail(
        err, QC_E_UNSUPPORTED,
        "tensor %s: GGUF has no type for %d bits %s; expected 4 or 5 bits, 6 or 8 symmetric ones, or "
        "a type for the output",
        info->name, g->bits, g->symmetric ? "symmetric" : "with zero points");
}

/* What llama.cpp takes where a row is no multiple of a type's block. */
static int fallback_of(int id)
{
    switch (id) {
    case QC_BLOCK_Q4_K:
        return QC_BLOCK_Q5_0;
    case QC_BLOCK_Q5_K:
        return QC_BLOCK_Q5_1;
    case QC_BLOCK_Q6_K:
        return QC_BLOCK_Q8_0;
    default:
        return QC_BLOCK_F16;
    }
}

static void store_as(const qc_block_info *type, qc_tensor_info *info)
{
    info->dtype = type->dtype;
    info->grid = type->grid;
}

static int hold_matrix(const char *type_name, const qc_tensor_use *use, const char *name,
                       qc_tensor_info *info, const char **ret_why, qc_err *err)
{
    const file_type *ft = type_of(type_name);
    int id = QC_BLOCK_F16, wanted;
    if (ft)
        id = use->kind == QC_KIND_HEAD || use->tied ? ft->head : type_in_mix(ft, use, name);
    else
        QC_TRY((id = type_of_grid(info, err)));
    wanted = id;
    int64_t cols = qc_tensor_cols(info);
    while (cols % qc_block_find(id)->n_elems)
        id = fallback_of(id);
    store_as(qc_block_find(id), info);
    if (id != wanted)
        *ret_why = "rows are no multiple of the type's block: the next type that fits";
    return QC_OK;
}

int qc_gguf_hold(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                 qc_err *err)
{
    char name[64];
    const file_type *ft = type_of(type);
    if (!qc_gguf_name_of(info->name, name))
        return qc_fail(err, QC_E_UNSUPPORTED,
                       "tensor %s: it has no name in GGUF files of the architectures llama, qwen2 and qwen3",
                       info->name);
    if (use->kind == QC_KIND_VECTOR) { /* llama.cpp adds and multiplies them in float32 */
        store_as(qc_block_find(QC_BLOCK_F32), info);
        return QC_OK;
    }
    if (info->dtype == QC_DT_GRID)
        return hold_matrix(type, use, name, info, ret_why, err);
    if (ft && qc_block_find(ft->linear)->dtype != QC_DT_GRID)
        store_as(qc_block_find(ft->linear), info);
    else if (info->dtype != QC_DT_F16 && info->dtype != QC_DT_BF16 && info->dtype != QC_DT_F32)
        store_as(qc_block_find(QC_BLOCK_F32), info);
    return QC_OK;
}

uint64_t qc_gguf_tensor_bytes(const char *type, const qc_tensor_info *info)
{
    const qc_block_info *block = qc_gguf_block_of(info);
    (void)type;
    uint64_t n = (uint64_t)qc_tensor_n_elems(info) / (uint64_t)block->n_elems * (uint64_t)block->n_bytes;
    return (n + QC_GGUF_ALIGNMENT - 1) / QC_GGUF_ALIGNMENT * QC_GGUF_ALIGNMENT;
}
