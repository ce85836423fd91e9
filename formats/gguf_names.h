/* What llama.cpp calls architectures and tensors, and Hugging Face. */
#ifndef QC_GGUF_NAMES_H
#define QC_GGUF_NAMES_H

#include <stdbool.h>
#include <stddef.h>

typedef struct qc_gguf_arch {
    const char *name;       /* general.architecture, and prefix of the model's keys */
    const char *model_type; /* of config.json */
    const char *class_name; /* "architectures" of config.json */
    bool pairs; /* rows of q and k are stored as pairs that rotate together (0, d/2, 1, d/2 + 1, ... of each
                   head) where checkpoints have the first halves, then the second */
} qc_gguf_arch;

/* Row i of the table, NULL behind its end. */
const qc_gguf_arch *qc_gguf_arch_at(int i);

/* The architecture under which a model_type is written; NULL if there is none. */
const qc_gguf_arch *qc_gguf_arch_of(const char *model_type);

/* "blk.3.attn_q.weight" of "model.layers.3.self_attn.q_proj.weight"; false if it has no such name. */
bool qc_gguf_name_of(const char *hf_name, char ret[64]);

/* And back. `ret` has room for 256 bytes. */
bool qc_gguf_name_to_hf(const char *name, char ret[256]);

/* Tensor with the divisors of Llama 3's rotary frequencies: config.json has numbers instead. */
#define QC_GGUF_ROPE_FREQS "rope_freqs.weight"

/* Llama 3 scales frequencies by wavelength: 1 / divisor = 1 for s >= 1, 1 / factor for s <= 0, else
 * (1 - s) / factor + s, with s = (original / wavelength - low) / (high - low). */
double qc_gguf_llama3_divisor(double wavelength, double factor, double low, double high, double original);

/* Where row r of a checkpoint stands among pairs that rotate together, in heads of head_dim rows. */
static inline long long qc_gguf_pair_row(long long r, long long head_dim)
{
    long long in_head = r % head_dim, half = in_head / (head_dim / 2);
    return r - in_head + 2 * (in_head - half * (head_dim / 2)) + half;
}

#endif
