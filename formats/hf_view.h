/* Checkpoint tensors that hold other tensors: the experts of a layer in one tensor of rank 3 become one
 * matrix per expert and projection, weights in FP8 with a scale per block become 16-bit values. */
#ifndef QC_HF_VIEW_H
#define QC_HF_VIEW_H

#include "qc_source.h"

/* Source over the tensors of `inner`, which it takes over, also on failure; `inner` itself if there is
 * nothing to do. PREFIX.experts.gate_up_proj [experts, 2 ffn, hidden]: PREFIX.experts.E.gate_proj.weight, the
 * first half of the rows, and up_proj, the second; PREFIX.experts.down_proj [experts, hidden, ffn]:
 * ...E.down_proj.weight. NAME.weight F8_E4M3 [rows, cols] with NAME.weight_scale_inv [ceil(rows / r),
 * ceil(cols / c)], [r, c] the weight_block_size of config.json: BF16 values, each the code times the scale of
 * its block in float32, rounded to nearest even. config.json is given without its quantization_config then.
 * QC_E_INPUT: scales that are missing, of another shape, or not positive and finite; a fused tensor of
 * another rank. QC_E_UNSUPPORTED: another kind of FP8. */
int qc_hf_view_open(qc_source *inner, qc_source **ret, qc_err *err) QC_WARN_UNUSED;

#endif
