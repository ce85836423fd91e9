/* Inside of a prepared layer, shared by the files of the forward pass. */
#ifndef QC_MODEL_LAYER_INTERNAL_H
#define QC_MODEL_LAYER_INTERNAL_H

#include "family.h"
#include "model.h"

#define QC_CHUNK_TOKENS 512 /* that go through a projection at once */

struct qc_layer {
    const qc_model *model;
    qc_backend *be;
    int index;
    int act_bits[QC_N_STAGES]; /* of the inputs of a stage's matrices; 0 = not quantized */
    int64_t act_group[QC_N_STAGES];
    qc_weight *weights[QC_N_SLOTS]; /* matrices, fused ones in parts; NULL where the model has none */
    qc_weight **experts;            /* theirs, see qc_layer_weight; NULL in a dense layer */
    float *vectors[QC_N_SLOTS];     /* norms and biases, backend memory; NULL where the model has none */
};

/* What the experts of a layer need beside the rest of a workspace. */
typedef struct qc_expert_scratch {
    qc_backend *be;
    float *norm;      /* [max_tokens, hidden] inputs of router and experts */
    float *logits;    /* [max_tokens, n_experts] */
    float *in, *out;  /* [chunk, hidden] rows of one expert */
    float *gate, *up; /* [chunk, expert_ffn] */
    qc_routing routing;
} qc_expert_scratch;

struct qc_workspace {
    qc_backend *be;
    int64_t max_tokens;
    int64_t rope_variant;         /* of the tables; -1: none yet */
    float *cos_t, *sin_t;         /* [max_tokens, rotary_dim / 2] */
    float *cos_local, *sin_local; /* the same, of layers that slide; NULL: no others */
    float *q, *k, *v;             /* [max_tokens, heads * head_dim], kv: [.., n_kv_heads * head_dim] */
    float *mix;                   /* attention's result, as q */
    float *norm;                  /* [chunk, hidden] */
    float *gate, *up;             /* [chunk, ffn]; NULL if no layer has an MLP of its own */
    qc_expert_scratch experts;    /* empty if no layer has experts */
};

/* Where the matrix of a slot lies, in one expert if it is a slot of experts. */
static inline qc_weight **qc_layer_weight(qc_layer *l, qc_slot slot, int64_t expert)
{
    int64_t n_slots = QC_N_SLOTS - QC_SLOT_FIRST_IN_EXPERT;
    return slot < QC_SLOT_FIRST_IN_EXPERT ? &l->weights[slot]
                                          : &l->experts[expert * n_slots + (slot - QC_SLOT_FIRST_IN_EXPERT)];
}

/* u[n, width] <- what the matrices of the stage shall see of it */
int qc_layer_quantize_input(const qc_layer *l, qc_stage stage, float *u, int64_t n, qc_err *err);

/* Nothing is allocated, and 0 bytes taken, for a model without experts. */
int qc_expert_scratch_new(const qc_model_config *config, qc_backend *be, int64_t max_tokens,
                          qc_expert_scratch *ret, qc_err *err);
void qc_expert_scratch_clear(qc_expert_scratch *s);
uint64_t qc_expert_scratch_bytes(const qc_model_config *config, int64_t max_tokens);

#endif
