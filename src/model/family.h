/* The family table: what makes one decoder family differ from another, as a row of flags, class defaults and
 * a map of tensor names. There is no source file per family: config.c reads a config by its row, model.c
 * finds the tensors by its map, forward.c follows the flags of the normalised config. */
#ifndef QC_MODEL_FAMILY_H
#define QC_MODEL_FAMILY_H

#include "model.h"

/* Which bias vectors exist. */
typedef enum {
    QC_BIAS_NEVER = 0,
    QC_BIAS_ALWAYS,
    QC_BIAS_BY_KEY,    /* attention_bias or mlp_bias of the config */
    QC_BIAS_BY_OUT_KEY /* attention_out_bias */
} qc_bias_rule;

/* Which layers attend through the sliding window. */
typedef enum {
    QC_WINDOW_NEVER = 0,
    QC_WINDOW_EVERY_LAYER,  /* sliding_window set: all of them */
    QC_WINDOW_UPPER_LAYERS, /* use_sliding_window: layers from max_window_layers on, or as layer_types says */
    QC_WINDOW_BY_SWITCH,    /* use_sliding_window: all of them */
    QC_WINDOW_PATTERN,      /* all but every window_pattern-th, or as layer_types says */
    QC_WINDOW_NO_ROPE       /* use_sliding_window: layers without rope, or as layer_types says */
} qc_window_rule;

/* What an absent key of config.json means; a config file may be a mere difference from these. */
typedef struct qc_class_defaults {
    int64_t vocab, hidden, n_layers, n_heads, ffn, max_positions;
    int64_t n_kv_heads;     /* 0 = as many as query heads */
    int64_t head_dim;       /* 0 = hidden / n_heads */
    int64_t sliding_window; /* 0 = none */
    int64_t max_window_layers;
    int64_t window_pattern, no_rope_interval;
    double rope_theta, rms_eps;
    double local_rope_theta; /* of layers that slide; 0 = they rotate like the others */
    double query_scalar;     /* query_pre_attn_scalar: scores are divided by its square root; 0 = head_dim */
    double attention_softcap, final_softcap;
    const char *act; /* NULL = silu */
    bool tied, attention_bias;
} qc_class_defaults;

/* Layers with experts instead of one MLP. */
typedef struct qc_expert_rule {
    const char *count_key;      /* field of config.json with their number; NULL: the family has none */
    const char *new_count_key;  /* its name in newer files; NULL: the same */
    const char *ffn_key;        /* with the width of one; NULL: intermediate_size, no layer is dense */
    int64_t count, chosen, ffn; /* class defaults; chosen: experts per token */
    bool renormalise;           /* weights of the chosen experts add up to 1, without asking norm_topk_prob */
    bool some_layers;           /* decoder_sparse_step and mlp_only_layers say which; else all */
} qc_expert_rule;

struct qc_family {
    const char *model_type; /* "model_type" of config.json */
    const char *class_name; /* "architectures" of config.json */
    qc_class_defaults defaults;
    qc_bias_rule qkv_bias, o_bias, mlp_bias;
    qc_qk_norm qk_norm;
    float norm_offset;
    bool scaled_embedding; /* by the square root of hidden */
    qc_window_rule window;
    qc_expert_rule experts;
    const char *act_key;      /* field with the activation; NULL = hidden_act */
    const char *const *keys;  /* fields of config.json that the family reads beyond those that all read */
    const char *layer_prefix; /* a layer's tensor is called PREFIX LAYER "." NAME */
    const char *const *names; /* [QC_N_SLOTS]; NULL = the family has no such tensor; '*' = expert */
    const char *const *other_names; /* tried where `names` is not found; NULL = there are none */
};

/* A model of several parts whose text_config describes a model of one of the families. */
typedef struct qc_wrapper {
    const char *model_type, *class_name;
} qc_wrapper;

/* Row of a model_type, NULL if there is none. */
const qc_family *qc_family_find(const char *model_type);
const qc_wrapper *qc_wrapper_find(const char *model_type);

/* Form number i, NULL past the end; the first is that of a model that is no part of another. */
const qc_name_form *qc_name_form_at(int i);

#define QC_NAME_BYTES 256

/* A name of the family's map (with the layer's prefix) as it stands in the checkpoint, cut to QC_NAME_BYTES.
 */
void qc_full_name(const qc_name_form *form, const char *name, char ret[QC_NAME_BYTES]);

/* Row number i, NULL past the end. */
const qc_family *qc_family_at(int i);

/* Does the family read a field of config.json that not all read? */
bool qc_family_reads(const qc_family *family, const char *key);

/* Length that a dimension of a tensor must have. */
typedef enum {
    QC_DIM_NONE = 0,
    QC_DIM_VOCAB,
    QC_DIM_HIDDEN,
    QC_DIM_Q,
    QC_DIM_KV,
    QC_DIM_FFN,
    QC_DIM_Q_NORM,
    QC_DIM_K_NORM,
    QC_DIM_QKV,
    QC_DIM_GATE_UP,
    QC_DIM_EXPERTS,
    QC_DIM_EXPERT_FFN
} qc_dim;

typedef struct qc_slot_info {
    qc_tensor_role role;
    qc_dim rows; /* QC_DIM_NONE: a vector of cols elements */
    qc_dim cols;
} qc_slot_info;

/* Role and shape of a slot. */
const qc_slot_info *qc_slot_of(qc_slot slot);

/* The matrices whose rows lie one below the other in that of a fused slot, ended by QC_N_SLOTS; NULL for
 * others. */
const qc_slot *qc_slot_parts(qc_slot slot);

/* The slot in which a part is stored, itself unless the family fuses it, and its first row there. */
qc_slot qc_slot_stored(const qc_model_config *config, qc_slot part, int64_t *ret_row0);

/* Does a model of this config have the tensor (in this layer, for slots of layers)? A tied model has no head
 * of its own. */
bool qc_slot_present(const qc_model_config *config, int layer, qc_slot slot);

/* Elements along a dimension; 0 for QC_DIM_NONE. */
int64_t qc_dim_elems(const qc_model_config *config, qc_dim dim);

#endif
