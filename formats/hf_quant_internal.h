/* Which tensors of a packed checkpoint belong together: by names, types, shapes, and what config.json says.
 */
#ifndef QC_HF_QUANT_INTERNAL_H
#define QC_HF_QUANT_INTERNAL_H

#include "packing.h"
#include "qc_source.h"

#include <cjson/cJSON.h>

/* A tensor of the model. */
typedef struct qc_logical {
    qc_tensor_info info;
    char *name;                  /* owned; NULL: info.name is the inner source's */
    const qc_packing *packing;   /* NULL: parts[0] is the tensor itself */
    qc_tensor_info grid_info;    /* as the packing knows it; = info unless g_idx is set */
    int64_t parts[QC_MAX_PARTS]; /* inner tensors in the order of the packing; -1 = there is none */
    int32_t *g_idx;              /* [cols] group of each column where they are not in order; owned, or NULL */
} qc_logical;

typedef struct qc_quant_layout {
    const qc_source *inner;
    const cJSON *config; /* quantization_config */
    const char *format;  /* "gptq", "awq", "compressed-tensors"; set by init */
    bool v2;             /* of GPTQ: zero points are stored as they are */
} qc_quant_layout;

/* Read the config as a whole. QC_E_UNSUPPORTED: a variant that is not read. */
int qc_quant_layout_init(qc_quant_layout *layout, qc_err *err) QC_WARN_UNUSED;

/* The tensor that begins with inner tensor i; *ret_whole = false for a further part of another. */
int qc_quant_layout_tensor(const qc_quant_layout *layout, int64_t i, qc_logical *ret, bool *ret_whole,
                           qc_err *err) QC_WARN_UNUSED;

/* A source of `tensors` over the inner one, which it takes over, as it does the list (qc_alloc), on failure
 * too. format and type are static. QC_E_INPUT: a name twice. */
int qc_packed_source_open(qc_source *inner, qc_logical *tensors, int64_t n_tensors, const char *format,
                          const char *type, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

#endif
