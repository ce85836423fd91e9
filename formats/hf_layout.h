/* Which files of a checkpoint folder hold its weights. */
#ifndef QC_HF_LAYOUT_H
#define QC_HF_LAYOUT_H

#include "qc_err.h"

#include <cjson/cJSON.h>
#include <stddef.h>

#define QC_HF_INDEX "model.safetensors.index.json"

typedef struct qc_hf_names {
    char **v; /* owned strings */
    size_t n, cap;
} qc_hf_names;

typedef struct qc_hf_layout {
    qc_hf_names shards; /* plain file names in byte order; all of them exist */
    cJSON *index; /* the parsed index, checked: weight_map has a string per tensor; NULL for a single file */
} qc_hf_layout;

/* Decide by the index if there is one, else take model.safetensors. Weight files that do not belong are
 * mentioned in one warning. QC_E_INPUT: files missing (all are listed), index broken; QC_E_UNSUPPORTED: only
 * weights under other names or of other kinds. */
int qc_hf_layout_find(const char *folder, qc_hf_layout *ret, qc_err *err) QC_WARN_UNUSED;
void qc_hf_layout_clear(qc_hf_layout *layout);

/* Side file of a folder by its name, which has no slash: owned copy with a NUL behind it. *ret = NULL and
 * QC_OK if there is none. */
int qc_hf_side_file(const char *folder, const char *name, char **ret, size_t *ret_bytes,
                    qc_err *err) QC_WARN_UNUSED;

/* Append a copy of a name / free all. */
int qc_hf_names_add(qc_hf_names *names, const char *name, qc_err *err) QC_WARN_UNUSED;
void qc_hf_names_clear(qc_hf_names *names);

/* "a, b, c and 7 more" into text[n_bytes]; for messages. */
void qc_hf_names_text(const qc_hf_names *names, char *text, size_t n_bytes);

#endif
