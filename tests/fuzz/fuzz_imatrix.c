/* Importance matrices in GGUF files: no input may crash; weights of what is accepted are finite and not
 * negative. */
#include "fuzz.h"
#include "imatrix.h"
#include "open.h"

#include <math.h>
#include <string.h>

static qc_source *src;
static qc_model model;

static void open_model(void)
{
    qc_err err = {0};
    FUZZ_CHECK(qc_source_open(fuzz_tiny_model("llama"), &src, &err) == QC_OK);
    FUZZ_CHECK(qc_model_open(src, &model, &err) == QC_OK);
}

static void check_weights(const qc_imatrix *im, int layer, qc_slot slot, int64_t width)
{
    const float *w = qc_imatrix_weights(im, layer, slot, 0);
    FUZZ_CHECK((w != NULL) == (qc_imatrix_tokens(im, layer, slot, 0) > 0));
    for (int64_t i = 0; w && i < width; i++)
        FUZZ_CHECK(isfinite(w[i]) && w[i] >= 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    qc_imatrix *im = NULL;
    qc_err err = {0};
    if (!src)
        open_model();
    int rc = qc_imatrix_open(fuzz_file(".gguf", data, n_bytes), &model, &im, &err);
    if (rc < 0) {
        FUZZ_CHECK(rc == QC_E_INPUT || rc == QC_E_UNSUPPORTED || rc == QC_E_RESOURCE);
        FUZZ_CHECK(err.code == rc && err.msg[0] && !strchr(err.msg, '\n'));
        return 0;
    }
    for (int layer = 0; layer < model.config.n_layers; layer++)
        for (int stage = 0; stage < QC_N_DENSE_STAGES; stage++)
            for (const qc_slot *slot = qc_stage_slots(model.config.family, (qc_stage)stage);
                 *slot != QC_N_SLOTS; slot++)
                check_weights(im, layer, *slot, qc_stage_width(&model.config, (qc_stage)stage));
    qc_imatrix_close(im);
    return 0;
}
