/* Rotary embedding in config.json: bases, kinds of scaling and their numbers; cases C-3 and C-4. */
#include "config_change.h"

#include <math.h>

START_TEST(c3_rope_theta)
{
    CHECK({"llama", "{\"rope_parameters\": {\"rope_theta\": 5e5}}", QC_E_INPUT,
           "rope_theta is 10000 at the top level but 500000"},
          {"llama", "{\"rope_parameters\": {\"rope_theta\": 10000}}", QC_OK, NULL},
          {"llama", "{\"rope_theta\": \"ABSENT\"}", QC_OK, "rope_theta is absent, class default 10000"},
          {"llama", "{\"rope_theta\": 0}", QC_E_INPUT, "rope_theta"},
          {"llama", "{\"rope_theta\": \"1e4\"}", QC_E_INPUT, "rope_theta"},
          {"llama",
           "{\"rope_theta\": \"ABSENT\", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e4}, "
           "\"sliding_attention\": {\"rope_theta\": 1e6}}}",
           QC_E_UNSUPPORTED, "differ by layer type"},
          {"llama3-rope", "{\"rope_parameters\": {\"rope_theta\": 10000, \"rope_type\": \"default\"}}",
           QC_E_INPUT, "disagree"},
          {"llama", "{\"rope_parameters\": [1]}", QC_E_INPUT, "not an object"});
}
END_TEST

START_TEST(rope_kinds)
{
    CHECK({"llama", "{\"rope_scaling\": {\"type\": \"dynamic\"}}", QC_E_INPUT, "lack \"factor\""},
          {"llama", "{\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 0.5}}", QC_E_INPUT, "dynamic"},
          {"llama",
           "{\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2, "
           "\"original_max_position_embeddings\": 64}}",
           QC_E_UNSUPPORTED, "original_max_position_embeddings"},
          {"llama", "{\"rope_scaling\": {\"rope_type\": \"longrope\"}}", QC_E_INPUT,
           "\"short_factor\" is not a list of 16 numbers"},
          {"llama", "{\"rope_scaling\": {\"rope_type\": \"su\"}}", QC_E_UNSUPPORTED, "rope_type \"su\""},
          {"llama", "{\"rope_scaling\": {\"rope_type\": \"linear\"}}", QC_E_INPUT, "factor"},
          {"llama", "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": -2}}", QC_E_INPUT, "factor"},
          {"llama", "{\"rope_scaling\": {\"rope_type\": \"linear\", \"type\": \"yarn\", \"factor\": 2}}",
           QC_E_INPUT, "yarn"},
          {"llama", "{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2, \"beta_fast\": 3}}",
           QC_E_UNSUPPORTED, "beta_fast"},
          {"llama", "{\"rope_scaling\": {\"rope_type\": \"default\", \"mrope_section\": [1, 2]}}",
           QC_E_UNSUPPORTED, "mrope_section"},
          {"llama", "{\"rope_scaling\": {\"partial_rotary_factor\": 0.5}}", QC_E_UNSUPPORTED,
           "partial_rotary_factor"},
          {"llama3-rope",
           "{\"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, "
           "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 64}}",
           QC_E_INPUT, "low_freq_factor"},
          {"qwen3-yarn", "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 0.5}}", QC_E_INPUT,
           "factor >= 1"},
          {"qwen3-yarn", "{\"max_position_embeddings\": 40}", QC_OK, "yarn factor 4 is used"});
}
END_TEST

START_TEST(c4_attention_factor)
{
#define YARN(more)                                                                                           \
    "{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": "     \
    "32" more "}}"
    static const struct {
        const char *patch;
        double factor;
    } cases[] = {
        {YARN(", \"attention_factor\": 1.0"), 1},
        {YARN(", \"attention_factor\": null"), 0.1 * 1.3862943611198906 + 1},
        {YARN(""), 0.1 * 1.3862943611198906 + 1},
        {YARN(", \"mscale\": 2, \"mscale_all_dim\": 1"),
         (0.2 * 1.3862943611198906 + 1) / (0.1 * 1.3862943611198906 + 1)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        qc_model_config c = load("qwen3-yarn", cases[i].patch);
        ck_assert(fabs(c.rope.attention_factor - cases[i].factor) <= 4 * 2.220446049250313e-16);
        qc_model_config_clear(&c);
    }
}
END_TEST

/* The bands of llama3 and the ends of the yarn ramp, at hand-computed points. */
START_TEST(rope_frequencies)
{
    double f[16];
    qc_model_config c = load("llama3-rope", "{}");
    qc_rope_inv_freq(&c.rope, 32, 1, f);
    ck_assert(f[0] == 1);                                      /* 64 / 2 pi = 10 turns: kept */
    ck_assert(fabs(f[15] * 8 - pow(1e4, -30.0 / 32)) < 1e-18); /* far below one turn: divided by 8 */
    double base = pow(1e4, -8.0 / 32),
           keep = (64 * base / 6.283185307179586 - 1) / 3; /* 1.02 turns: between */
    ck_assert(keep > 0 && keep < 1 && fabs(f[4] - ((1 - keep) * base / 8 + keep * base)) < 1e-15);
    qc_model_config_clear(&c);
    c = load("qwen3-yarn", "{}");
    qc_rope_inv_freq(&c.rope, 32, 1, f);
    ck_assert(f[0] == 1); /* the ramp runs from dimension max(0, floor(-3.2)) = 0 to ceil(2.83) = 3 */
    ck_assert(fabs(f[1] - pow(1e4, -2.0 / 32) * (2.0 / 3 + 1.0 / 12)) < 1e-15);
    ck_assert(fabs(f[3] - pow(1e4, -6.0 / 32) / 4) < 1e-15);
    qc_model_config_clear(&c);
}
END_TEST

/* The numbers of published Qwen3 files: 128 dimensions, base 1e6, 32768 positions. The ramp runs from
 * dimension 128 ln(32768 / (32 * 2 pi)) / (2 ln 1e6) = 23.595 to 128 ln(32768 / (2 pi)) / (2 ln 1e6)
 * = 39.650, rounded outwards. */
START_TEST(yarn_ramp)
{
    for (int truncate = 0; truncate < 2; truncate++) {
        qc_rope_config rope = {.kind = QC_ROPE_YARN,
                               .theta = 1e6,
                               .factor = 4,
                               .original_max_positions = 32768,
                               .beta_fast = 32,
                               .beta_slow = 1,
                               .attention_factor = 1,
                               .truncate = truncate};
        double f[64], low = truncate ? 23 : 128 * log(32768 / (64 * acos(-1.0))) / (2 * log(1e6));
        double high = truncate ? 40 : 128 * log(32768 / (2 * acos(-1.0))) / (2 * log(1e6));
        qc_rope_inv_freq(&rope, 128, 1, f);
        for (int i = 0; i < 64; i++) {
            double base = pow(1e6, -i / 64.0), ramp = i < low ? 0 : i > high ? 1 : (i - low) / (high - low);
            ck_assert(fabs(f[i] / base - (1 - 0.75 * ramp)) < 1e-12);
        }
    }
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"c3_rope_theta", c3_rope_theta},
        {"rope_kinds", rope_kinds},
        {"c4_attention_factor", c4_attention_factor},
        {"rope_frequencies", rope_frequencies},
        {"yarn_ramp", yarn_ramp},
        {NULL, NULL},
    };
    return run_tests("config_rope", cases);
}
