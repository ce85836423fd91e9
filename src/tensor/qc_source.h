/* A source: any readable artifact (HF folder, qpk file, ...) as a set of named logical tensors plus side
 * files. Each reader in formats/ fills the table of functions; consumers (src/model, calib, src/cli) know
 * only this.
 *
 * Tensor names are those of Hugging Face checkpoints ("model.layers.0.self_attn.q_proj.weight"), whatever the
 * container calls them. Functions may be called from several threads at once, except close. */
#ifndef QC_SOURCE_H
#define QC_SOURCE_H

#include "qc_tensor.h"

typedef struct qc_source qc_source;

struct qc_source {
    const char *format; /* "hf", "qpk"; static */
    const char *type;   /* subtype of the format, as writers call it; static, NULL = it has none */
    const char *path;   /* for messages: as opened, or what somebody who outlives the source put here */

    /* Paths of the files that make it up, in a fixed order (what a manifest hashes); owned by the source. */
    char *const *files;
    int64_t n_files;

    int64_t n_tensors;
    /* Description of tensor 0 .. n_tensors - 1, valid until close. */
    const qc_tensor_info *(*info)(const qc_source *src, int64_t tensor);
    /* Index of a name, -1 if there is none. */
    int64_t (*find)(const qc_source *src, const char *name);
    /* dst[n_rows, cols] = values as float32; the row range must lie inside. */
    int (*read_rows)(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, float *dst,
                     qc_err *err);
    /* Codes, scales and zeros of rows of a tensor on a grid (arrays of *rows are the caller's and large
     * enough). NULL if no tensor of this source is on a grid. */
    int (*read_codes)(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows, qc_code_rows *rows,
                      qc_err *err);
    /* Stored bytes of a dense tensor (info.n_bytes long), NULL if they do not lie in one piece. */
    const void *(*raw)(const qc_source *src, int64_t tensor);
    /* The rows will not be needed soon: give mapped pages back. */
    void (*release)(const qc_source *src, int64_t tensor, int64_t row0, int64_t n_rows);
    /* Side file by its Hugging Face name ("config.json", "tokenizer.json", "tokenizer_config.json",
     * "generation_config.json", ...): owned copy with a NUL behind it (qc_free). *ret = NULL and QC_OK if the
     * source has none. */
    int (*side_file)(const qc_source *src, const char *name, char **ret, size_t *ret_bytes, qc_err *err);
    /* Compare all data with the checksums that the file holds; NULL if the format has none. */
    int (*check)(const qc_source *src, qc_err *err);
    void (*close)(qc_source *src);
};

/* QC_E_INPUT names the first damaged part; nothing to compare is fine. */
static inline int qc_source_check(const qc_source *src, qc_err *err)
{
    return src->check ? src->check(src, err) : QC_OK;
}

/* NULL is fine. */
static inline void qc_source_close(qc_source *src)
{
    if (src)
        src->close(src);
}

#endif
