/* Writers: one table of functions per format. All of them take the same stream: metadata and side files,
 * then a declaration of every tensor in the plan's order, then the rows of those tensors in the same order.
 * Readers and writers never meet; both speak logical tensors (qc_tensor.h).
 *
 *   qc_writer_format_find -> hold, tensor_bytes (planning: what would be stored, or why it can not be)
 *   create -> add_meta, add_file -> declare each tensor, alias -> size
 *          -> begin_tensor, put_dense | put_codes, end_tensor for each -> finish -> publish
 *
 * A writer made with `count` ends at size: nothing is written, but what the whole model makes impossible is
 * refused. A failed call leaves a writer fit for discard only. Output appears whole or not at all: finish
 * leaves it under a temporary name beside the final one (a folder as a folder), publish renames it. */
#ifndef QC_WRITER_H
#define QC_WRITER_H

#include "qc_tensor.h"

/* Rows come in multiples of this, except in the last call of a tensor. */
#define QC_WRITER_ROWS 16

typedef struct qc_writer qc_writer;
typedef struct qc_writer_format qc_writer_format;

/* What a tensor is to the model; formats treat these kinds differently. */
typedef enum {
    QC_KIND_LINEAR = 0, /* matrix of a decoder layer */
    QC_KIND_EMBEDDING,  /* the table of embeddings; a tied head reads it too */
    QC_KIND_HEAD,       /* a head of its own */
    QC_KIND_VECTOR      /* norm, bias or router: never on a grid */
} qc_tensor_kind;

typedef struct qc_tensor_use {
    qc_tensor_kind kind;
    int layer; /* -1 outside the layers */
    int n_layers;
    bool tied;       /* a table of embeddings that is the head, too */
    qc_dtype source; /* as the tensor is stored in the source; QC_DT_GRID if it is on a grid there */
} qc_tensor_use;

typedef struct qc_writer_options {
    const char *path;     /* what the file or folder will be called */
    const char *type;     /* subtype of the format; NULL = its default */
    bool count;           /* write nothing; `path` is for messages */
    bool force;           /* replace at publication what is there */
    uint64_t shard_bytes; /* of tensors: folders of safetensors begin a new file where this would be passed */
} qc_writer_options;

/* Normalised configuration of the model, keys as in docs/formats/qpk.md ("model.hidden", "rope.theta"). */
typedef enum { QC_META_U64, QC_META_F64, QC_META_STRING, QC_META_U64_ARRAY, QC_META_F64_ARRAY } qc_meta_type;

typedef struct qc_meta {
    const char *key;
    qc_meta_type type;
    uint64_t u64;
    double f64;
    const char *string;
    const uint64_t *array;   /* [n_elems] */
    const double *f64_array; /* [n_elems] */
    uint32_t n_elems;
} qc_meta;

struct qc_writer_format {
    const char *name;      /* as recipes and reports call it: "qpk" */
    const char *extension; /* of its files, with the dot; NULL: it is a folder */
    const char *types;     /* subtypes "a|b", the default first; NULL: it has none */
    bool packs_whole;      /* a matrix on a grid is put together in memory before it is written */
    bool own_grids;        /* groups and types of scales are the format's, whatever the recipe says of them */

    /* How a tensor that the policy wants as *info would be stored: *info is changed to that. Another grid:
     * the plan rounds onto it. Dense although a grid was wanted: the format can not hold such a matrix on a
     * grid, its values are stored, and *ret_why says so (static text). A grid that is not the type's own,
     * because that does not fit this matrix: *ret_why says so as well. It is untouched otherwise. Another
     * dense dtype: values are converted. QC_E_UNSUPPORTED: such an output would be of no use; says why. */
    int (*hold)(const char *type, const qc_tensor_use *use, qc_tensor_info *info, const char **ret_why,
                qc_err *err);
    /* Bytes that a tensor which hold approved takes in the output. */
    uint64_t (*tensor_bytes)(const char *type, const qc_tensor_info *info);
    /* QC_E_USAGE, QC_E_RESOURCE: the output can not be made under this name. */
    int (*create)(const qc_writer_options *options, qc_writer **ret, qc_err *err);
};

/* Functions of an open writer. QC_E_RESOURCE: out of memory or disk; QC_E_USAGE: calls out of order;
 * QC_E_INPUT: a name twice, a code, scale or shape that the format can not hold. */
struct qc_writer {
    const qc_writer_format *format;
    /* Strings and arrays are copied; a key once. */
    int (*add_meta)(qc_writer *w, const qc_meta *meta, qc_err *err);
    /* Side file by its Hugging Face name ("config.json", "tokenizer.json", ...), and "manifest.json". */
    int (*add_file)(qc_writer *w, const char *name, const void *data, size_t n_bytes, qc_err *err);
    /* A tensor that will come, as hold approved it. */
    int (*declare)(qc_writer *w, const qc_tensor_use *use, const qc_tensor_info *info, qc_err *err);
    /* `name` is another name of the declared tensor `target` (a tied head). */
    int (*alias)(qc_writer *w, const char *name, const char *target, qc_err *err);
    /* Ends the declarations. Bytes of the finished output; exact for a writer that counts. QC_E_UNSUPPORTED:
     * these tensors do not go together in this format. */
    int (*size)(qc_writer *w, uint64_t *ret_bytes, qc_err *err);
    /* One tensor after the other, in the declared order, rows from the top: those of a dense tensor as bytes
     * of its dtype, those on a grid as codes. */
    int (*begin_tensor)(qc_writer *w, const qc_tensor_info *info, qc_err *err);
    int (*put_dense)(qc_writer *w, const void *data, int64_t n_rows, qc_err *err);
    int (*put_codes)(qc_writer *w, const qc_code_rows *rows, qc_err *err);
    int (*end_tensor)(qc_writer *w, qc_err *err);
    /* All is on disk, still under a temporary name, which is returned for reading back. */
    int (*finish)(qc_writer *w, const char **ret_temp_path, qc_err *err);
    /* Give it its final name (or other_path, as NAME.rejected, replacing what is there) and free the writer,
     * also on failure. */
    int (*publish)(qc_writer *w, const char *other_path, qc_err *err);
    /* Remove what was written and free. */
    void (*discard)(qc_writer *w);
};

/* Format by its name; NULL if there is none. */
const qc_writer_format *qc_writer_format_find(const char *name);

/* Row i of the table of formats, NULL past its end. */
const qc_writer_format *qc_writer_format_at(int i);

/* May an output of this format become `path`? As qc_outfile_check and qc_outfolder_check. */
int qc_writer_check_path(const qc_writer_format *format, const char *path, bool force,
                         qc_err *err) QC_WARN_UNUSED;

/* NULL is fine. */
static inline void qc_writer_discard(qc_writer *w)
{
    if (w)
        w->discard(w);
}

#endif
