/* Parts of the config reader shared by its files. */
#ifndef QC_MODEL_CONFIG_INTERNAL_H
#define QC_MODEL_CONFIG_INTERNAL_H

#include "config.h"
#include "family.h"
#include "qc_buf.h"
#include "qc_json.h"
#include "qc_log.h"

#define QC_DIM_MAX (1 << 24) /* of any width: keeps products of two inside int64 */

typedef struct qc_config_reader {
    const qc_source *src;
    const char *file;   /* "config.json" with the source's path, for messages */
    const cJSON *outer; /* the whole document */
    const cJSON *json; /* the object with the text model's settings: the document itself or its text_config */
    const qc_family *family;
    const qc_wrapper *wrapper; /* NULL: the model is no part of another */
    qc_model_config *out;
    qc_buf notes;
    qc_err *err;
} qc_config_reader;

/* Log a remark and keep it. QC_E_RESOURCE when out of memory. */
int qc_config_note(qc_config_reader *r, qc_log_level level, const char *fmt, ...) QC_WARN_UNUSED
    QC_PRINTF(3, 4);

/* Does the text model's object have a member of this name, null included? */
bool qc_config_has(const qc_config_reader *r, const char *key);

/* Integer of `object` in lo .. hi, `absent` (not checked) if it is absent or null. */
int qc_config_int(qc_config_reader *r, const cJSON *object, const char *key, int64_t absent, int64_t lo,
                  int64_t hi, int64_t *ret) QC_WARN_UNUSED;

/* A width or count: the class default, with a note, if the key is absent. */
int qc_config_count(qc_config_reader *r, const char *key, int64_t class_default, int64_t hi,
                    int64_t *ret) QC_WARN_UNUSED;

/* Finite number, `absent` if absent or null; *ret_present (may be NULL) says which. */
int qc_config_number(qc_config_reader *r, const cJSON *object, const char *key, double absent, double *ret,
                     bool *ret_present) QC_WARN_UNUSED;

int qc_config_bool(qc_config_reader *r, const cJSON *object, const char *key, bool absent,
                   bool *ret) QC_WARN_UNUSED;

/* String, NULL if absent or null; belongs to the document. */
int qc_config_string(qc_config_reader *r, const cJSON *object, const char *key,
                     const char **ret) QC_WARN_UNUSED;

/* Refuse every field that matters and is not understood. */
int qc_config_check_keys(qc_config_reader *r) QC_WARN_UNUSED;

/* Sliding windows and rotation by layer; n_layers is already known. */
int qc_config_read_layers(qc_config_reader *r) QC_WARN_UNUSED;

/* rope_theta, rope_scaling and rope_parameters; head_dim, max_positions and n_layers are already known. */
int qc_config_read_rope(qc_config_reader *r) QC_WARN_UNUSED;

/* End and begin ids of config.json, generation_config.json and tokenizer_config.json; vocab is already known.
 */
int qc_config_read_ids(qc_config_reader *r) QC_WARN_UNUSED;

#endif
