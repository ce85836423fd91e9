/* Formats that engines load: folders with a config.json that describes how matrices are packed. One writer
 * (engine_writer.c) serves them all; a format is a row of this struct. */
#ifndef QC_ENGINE_FORMAT_H
#define QC_ENGINE_FORMAT_H

#include "metas.h"
#include "packing.h"
#include "part_set.h"
#include "qc_buf.h"

#include <cjson/cJSON.h>

extern const qc_writer_format qc_gptq_writer_format, qc_awq_writer_format, qc_ct_writer_format,
    qc_hf_writer_format, qc_onnx_writer_format;

/* Grid of some matrices of an output. */
typedef struct qc_scheme {
    int bits;
    bool symmetric;
    int64_t group; /* -1 = one scale per row */
    int act_bits;  /* 0 = activations are not quantized */
} qc_scheme;

/* A matrix of the layers, as the configuration has to describe it. */
typedef struct qc_scheme_entry {
    char *module; /* "model.layers.0.self_attn.q_proj"; owned */
    int scheme;   /* number in qc_schemes.schemes, -1 = left in 16 bit */
    int64_t cols; /* width of the matrix */
} qc_scheme_entry;

typedef struct qc_schemes {
    const char *type;   /* subtype of the format as asked, NULL = default; borrowed */
    const char *tool;   /* "qconvert:1.0"; borrowed, may be NULL */
    qc_scheme *schemes; /* [n_schemes], the most frequent one first after qc_schemes_sort */
    int n_schemes;
    qc_scheme_entry *entries; /* [n_entries], in the plan's order */
    int64_t n_entries, cap_entries;
} qc_schemes;

/* A folder in the making, as far as a format's own files and tensors depend on it. */
typedef struct qc_engine_contents {
    const qc_metas *metas;
    const qc_tensor_info *tensors; /* [n_tensors] as declared */
    int64_t n_tensors;
    bool tied;        /* the head is the table of embeddings */
    qc_part_set *set; /* with the parts of these tensors, and behind them those of own_tensors */
    int64_t n_parts;  /* of these tensors */
} qc_engine_contents;

typedef struct qc_engine_format {
    const char *title;   /* for people */
    const char *library; /* that loads it, as model cards call it */
    bool packs_tables;   /* embedding and head may be on a grid, too */
    int (*new_set)(uint64_t shard_bytes, qc_part_set **ret, qc_err *err);
    /* Layout of a matrix; NULL: it is stored as values. */
    const qc_packing *(*packing)(const qc_schemes *schemes, const qc_tensor_info *info);
    /* quantization_config of config.json; NULL and QC_OK for none. QC_E_UNSUPPORTED: what the format can not
     * put together. The caller watches for failed allocations (qc_json_watch). */
    int (*config)(const qc_schemes *schemes, cJSON **ret, qc_err *err);
    const char *config_file; /* another file that engines look for with the same content; NULL = none */
    /* Tensors that the format adds to those of the model: announce them, or write them. NULL: it adds none.
     * QC_E_UNSUPPORTED: the engine does not compute such a model. */
    int (*own_tensors)(const qc_engine_contents *contents, bool write, qc_err *err);
    /* Further file number i of the folder, once the set is laid out: its name (static) and content in *ret
     * (empty). *ret_name = NULL behind the last one. NULL: there are none. */
    int (*file)(const qc_engine_contents *contents, int i, const char **ret_name, qc_buf *ret, qc_err *err);
} qc_engine_format;

extern const qc_engine_format qc_engine_gptq, qc_engine_awq, qc_engine_ct, qc_engine_hf, qc_engine_onnx;

/* Type in which the format hf stores values of a grid; NULL: of a model whose type is unknown. */
qc_dtype qc_hf_value_dtype(const char *type);

/* A writer of a folder. */
int qc_engine_writer_create(const qc_writer_format *format, const qc_engine_format *engine,
                            const qc_writer_options *options, qc_writer **ret, qc_err *err) QC_WARN_UNUSED;

/* Add a matrix of the layers: on a grid, or dense. */
int qc_schemes_add(qc_schemes *schemes, const qc_tensor_info *info, qc_err *err) QC_WARN_UNUSED;
/* Count a matrix that is one group wide to the schemes with that group, if there are any; put the most
 * frequent scheme first. */
void qc_schemes_sort(qc_schemes *schemes);
void qc_schemes_clear(qc_schemes *schemes);

#endif
