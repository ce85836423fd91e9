/* Broken and hostile files: each field damaged, each length cut, one clear line and the right code. */
#include "qpk_test.h"

#include "runtime/qpk_format.h"

#include <zlib.h>

static uint8_t *good;
static size_t good_bytes;

static void load_good(void)
{
    char *path = temp_name("good.qpk");
    write_sample(path);
    good = (uint8_t *)slurp(path, &good_bytes);
    unlink(path);
    free(path);
}

static uint64_t section_offset(const uint8_t *file, int section)
{
    uint64_t offset;
    memcpy(&offset, file + QPK_H_SECTIONS + section * QPK_SECTION_BYTES, sizeof offset);
    return offset;
}

static void put(uint8_t *at, int n_bytes, uint64_t value)
{
    memcpy(at, &value, (size_t)n_bytes);
}

/* Make the checksums of tables and header right again. */
static void repair(uint8_t *file, size_t n_bytes)
{
    for (int s = QPK_SEC_STRINGS; s < QPK_N_SECTIONS; s++) {
        uint8_t *entry = file + QPK_H_SECTIONS + s * QPK_SECTION_BYTES;
        uint64_t offset, size;
        memcpy(&offset, entry + QPK_S_OFFSET, 8);
        memcpy(&size, entry + QPK_S_BYTES, 8);
        if (offset <= n_bytes && size <= n_bytes - offset)
            put(entry + QPK_S_CRC, 4, crc32_z(0, file + offset, size));
    }
    put(file + QPK_H_CRC, 4, crc32_z(0, file, QPK_H_CRC));
}

typedef struct bad_case {
    const char *what;
    int section; /* -1: position from the start of the file */
    int position;
    int n_bytes; /* of the new value */
    uint64_t value;
    int code;
    const char *text; /* part of the message */
} bad_case;

#define REC(n, bytes, field) ((n) * (bytes) + (field))
#define SEC(s, field)        (QPK_H_SECTIONS + (s)*QPK_SECTION_BYTES + (field))
enum { T = QPK_TENSOR_BYTES, U = QPK_E_UNSUPPORTED, I = QPK_E_INPUT };

static const bad_case cases[] = {
    {"magic", -1, 0, 1, 'X', I, "not a qpk file (wrong magic)"},
    {"text mode", -1, 4, 1, '\n', I, "not a qpk file (wrong magic)"},
    {"version", -1, QPK_H_VERSION, 4, 1, U, "format version 1, this library reads version 0"},
    {"header size", -1, QPK_H_HEADER_BYTES, 4, 255, I, "header of 255 bytes"},
    {"required", -1, QPK_H_REQUIRED, 8, 3, U, "needs features 0x2 "},
    {"file size", -1, QPK_H_FILE_BYTES, 8, 1, I, "its header says 1 (cut short?)"},
    {"sections", -1, QPK_H_N_SECTIONS, 4, 9, I, "with 9 sections"},
    {"reserved", -1, QPK_H_RESERVED1, 4, 1, U, "reserved field of the header"},
    {"reserved", -1, QPK_H_RESERVED2 + 11, 1, 1, U, "reserved field of the header"},
    {"section alignment", -1, SEC(QPK_SEC_STRINGS, QPK_S_OFFSET), 8, 4096 + 64, I,
     "section of strings starts at byte 4160, expected a multiple of 4096"},
    {"section overlap", -1, SEC(QPK_SEC_TENSOR_DATA, QPK_S_OFFSET), 8, 0, I, "section of tensor data"},
    {"section overlap", -1, SEC(QPK_SEC_FILE_DATA, QPK_S_OFFSET), 8, 4096, I, "section of file data"},
    {"section outside", -1, SEC(QPK_SEC_TENSORS, QPK_S_OFFSET), 8, 1ull << 40, I, "section of tensors"},
    {"section size", -1, SEC(QPK_SEC_TENSOR_DATA, QPK_S_BYTES), 8, UINT64_MAX, I, "section of tensor data"},
    {"section size", -1, SEC(QPK_SEC_ALIASES, QPK_S_BYTES), 8, 0, I, "expected 1 records of 16 bytes"},
    {"section count", -1, SEC(QPK_SEC_META, QPK_S_COUNT), 4, 0xffffffff, I, "expected 4294967295 records"},
    {"meta name offset", QPK_SEC_META, QPK_M_KEY, 4, 0xffffffff, I, "metadata key 0 has no proper name"},
    {"meta name length", QPK_SEC_META, QPK_M_KEY + 4, 4, 0xffffffff, I, "metadata key 0 has no proper name"},
    {"meta name short", QPK_SEC_META, QPK_M_KEY + 4, 4, 3, I, "metadata key 0 has no proper name"},
    {"meta name empty", QPK_SEC_META, QPK_M_KEY + 4, 4, 0, I, "metadata key 0 has no proper name"},
    {"meta type", QPK_SEC_META, QPK_M_TYPE, 4, 77, U, "metadata 'model.family': unknown type 77"},
    {"meta string", QPK_SEC_META, QPK_M_VALUE, 8, 1ull << 33, I,
     "metadata 'model.family': text lies outside"},
    {"meta string", QPK_SEC_META, QPK_M_COUNT, 4, 4, I, "metadata 'model.family': text lies outside"},
    {"meta count", QPK_SEC_META, REC(1, QPK_META_BYTES, QPK_M_COUNT), 4, 2, I,
     "'model.hidden': 2 numbers, expected 1"},
    {"meta array", QPK_SEC_META, REC(4, QPK_META_BYTES, QPK_M_COUNT), 4, 1u << 31, I,
     "'model.eos': array lies outside"},
    {"meta array", QPK_SEC_META, REC(4, QPK_META_BYTES, QPK_M_VALUE), 8, 4, I,
     "'model.eos': array lies outside"},
    {"meta array", QPK_SEC_META, REC(4, QPK_META_BYTES, QPK_M_VALUE), 8, UINT64_MAX - 7, I,
     "'model.eos': array lies outside"},
    {"meta reserved", QPK_SEC_META, QPK_M_RESERVED, 1, 1, U, "metadata 'model.family': reserved field"},
    {"file method", QPK_SEC_FILES, QPK_F_METHOD, 4, 2, U, "side file 'config.json': unknown compression 2"},
    {"file bomb", QPK_SEC_FILES, QPK_F_RAW_BYTES, 8, 1ull << 40, I,
     "side file 'config.json': 1099511627776 bytes can not come from"},
    {"file size", QPK_SEC_FILES, QPK_F_STORED_BYTES, 8, UINT64_MAX, I,
     "side file 'config.json' (18446744073709551615 bytes"},
    {"file align", QPK_SEC_FILES, QPK_F_OFFSET, 8, 1, I, "side file 'config.json' starts at byte 1"},
    {"file outside", QPK_SEC_FILES, QPK_F_OFFSET, 8, 4096, I, "side file 'config.json'"},
    {"file reserved", QPK_SEC_FILES, QPK_F_RESERVED, 8, 1, U, "side file 'config.json': reserved"},
    {"stored size", QPK_SEC_FILES, REC(1, QPK_FILE_BYTES, QPK_F_RAW_BYTES), 8, 1, I,
     "side file 'empty.txt': 1 bytes can not come from 0"},
    {"tensor dtype", QPK_SEC_TENSORS, QPK_T_DTYPE, 2, 63, U, "unknown element type 63"},
    {"tensor dtype", QPK_SEC_TENSORS, QPK_T_DTYPE, 2, 1, U, "grid fields are set in a dense tensor"},
    {"tensor rank", QPK_SEC_TENSORS, QPK_T_N_DIMS, 1, 5, I, "5 dimensions"},
    {"tensor rank", QPK_SEC_TENSORS, QPK_T_N_DIMS, 1, 1, I, "dimension 1 is 64"},
    {"tensor shape", QPK_SEC_TENSORS, QPK_T_SHAPE, 8, UINT64_MAX, I, "dimension 0 is"},
    {"tensor shape", QPK_SEC_TENSORS, QPK_T_SHAPE, 8, 1ull << 47, I, "more than 2^48 elements"},
    {"tensor shape", QPK_SEC_TENSORS, QPK_T_SHAPE, 8, 1ull << 40, I, "sizes do not fit"},
    {"tensor shape", QPK_SEC_TENSORS, QPK_T_SHAPE, 8, 0, I, "can not be put on a grid"},
    {"tensor rows", QPK_SEC_TENSORS, QPK_T_SHAPE, 8, 49, I,
     "sizes do not fit its shape and grid (expected 4 tiles of"},
    {"tensor cols", QPK_SEC_TENSORS, QPK_T_SHAPE + 8, 8, 63, I, "groups of 64 columns"},
    {"tensor offset", QPK_SEC_TENSORS, QPK_T_OFFSET, 8, 4097, I, "starts at byte 4097"},
    {"tensor offset", QPK_SEC_TENSORS, QPK_T_OFFSET, 8, 0, I, "is outside its section or overlaps"},
    {"tensor offset", QPK_SEC_TENSORS, QPK_T_OFFSET, 8, 1ull << 62, I, "is outside its section or overlaps"},
    {"tensor overlap", QPK_SEC_TENSORS, REC(1, T, QPK_T_OFFSET), 8, 4096, I,
     "'model.layers.0.mlp.up_proj.weight' ("},
    {"tensor bytes", QPK_SEC_TENSORS, QPK_T_BYTES, 8, 64, I, "sizes do not fit"},
    {"dense bytes", QPK_SEC_TENSORS, REC(2, T, QPK_T_BYTES), 8, 127, I,
     "'model.norm.weight': 127 bytes, expected 128"},
    {"dense grid", QPK_SEC_TENSORS, REC(2, T, QPK_T_GROUP), 8, 1, U, "grid fields are set"},
    {"layout", QPK_SEC_TENSORS, QPK_T_LAYOUT, 1, 2, U, "layout 2"},
    {"grid", QPK_SEC_TENSORS, QPK_T_GRID, 1, 2, U, "grid 2"},
    {"codes", QPK_SEC_TENSORS, QPK_T_CODES, 1, 1, U, "codes 1"},
    {"flags", QPK_SEC_TENSORS, QPK_T_FLAGS, 1, 2, U, "flags 2"},
    {"zeros flag", QPK_SEC_TENSORS, QPK_T_FLAGS, 1, 1, I, "zero points of type 0"},
    {"zeros type", QPK_SEC_TENSORS, REC(1, T, QPK_T_ZERO_DTYPE), 2, 5, I, "zero points of type 5"},
    {"bits", QPK_SEC_TENSORS, QPK_T_BITS, 1, 0, I, "0 bits per code"},
    {"bits", QPK_SEC_TENSORS, QPK_T_BITS, 1, 9, I, "9 bits per code"},
    {"bits", QPK_SEC_TENSORS, QPK_T_BITS, 1, 4, I, "sizes do not fit"},
    {"scale type", QPK_SEC_TENSORS, QPK_T_SCALE_DTYPE, 2, 4, I, "scale type 4"},
    {"group", QPK_SEC_TENSORS, QPK_T_GROUP, 8, 0, I, "groups of 0 columns"},
    {"group", QPK_SEC_TENSORS, QPK_T_GROUP, 8, 30, I, "groups of 30 columns"},
    {"group", QPK_SEC_TENSORS, QPK_T_GROUP, 8, UINT64_MAX, I, "groups of -1 columns"},
    {"group", QPK_SEC_TENSORS, QPK_T_GROUP, 8, 32, I, "sizes do not fit"},
    {"tile", QPK_SEC_TENSORS, QPK_T_TILE_BYTES, 8, 0, I, "sizes do not fit"},
    {"scales", QPK_SEC_TENSORS, QPK_T_SCALES, 8, UINT64_MAX, I, "sizes do not fit"},
    {"zeros", QPK_SEC_TENSORS, QPK_T_ZEROS, 8, 64, I, "sizes do not fit"},
    {"reserved", QPK_SEC_TENSORS, QPK_T_RESERVED1, 2, 2, U, "reserved field is unknown"},
    {"reserved", QPK_SEC_TENSORS, QPK_T_RESERVED2, 1, 2, U, "reserved field is unknown"},
    {"reserved", QPK_SEC_TENSORS, QPK_T_RESERVED3, 1, 2, U, "reserved field is unknown"},
    {"acts", QPK_SEC_TENSORS, QPK_T_ACT_SCHEME, 1, 1, U, "activation scheme 1 is unknown"},
    {"acts", QPK_SEC_TENSORS, QPK_T_ACT_SCHEME, 1, 2, I, "the header does not say so"},
    {"acts", QPK_SEC_TENSORS, QPK_T_ACT_BITS, 1, 8, I, "are set without one"},
    {"acts", QPK_SEC_TENSORS, QPK_T_ACT_GROUP, 4, 32, I, "are set without one"},
    {"acts", QPK_SEC_TENSORS, REC(2, T, QPK_T_ACT_SCHEME), 1, 2, U, "grid fields are set"},
    {"reserved", QPK_SEC_TENSORS, QPK_TENSOR_BYTES - 1, 1, 1, U, "reserved field is unknown"},
    {"alias target", QPK_SEC_ALIASES, QPK_A_TARGET, 4, 3, I, "alias 'lm_head.weight' names tensor 3 of 3"},
    {"alias reserved", QPK_SEC_ALIASES, QPK_A_RESERVED, 4, 1, I, "alias 'lm_head.weight'"},
};

START_TEST(bad_fields)
{
    load_good();
    uint8_t *file = malloc(good_bytes);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const bad_case *c = &cases[i];
        char text[512] = "";
        qpk_file *f = NULL;
        memcpy(file, good, good_bytes);
        uint64_t base = c->section < 0 ? 0 : section_offset(good, c->section);
        put(file + base + (uint64_t)c->position, c->n_bytes, c->value);
        repair(file, good_bytes);
        int rc = qpk_open_memory(file, good_bytes, "F", &f, text, sizeof text);
        ck_assert_msg(rc == c->code && strstr(text, c->text) && strncmp(text, "F: ", 3) == 0 &&
                          !strchr(text, '\n') && !f,
                      "case %zu (%s): code %d, message '%s', expected %d and '%s'", i, c->what, rc, text,
                      c->code, c->text);
    }
    free(file);
}
END_TEST

/* Fields of an activation scheme in a file that says that it has one. */
START_TEST(bad_acts)
{
    static const struct {
        int bits;
        uint32_t group;
    } bad[] = {{1, 0}, {9, 0}, {0, 32}, {8, 16}, {8, 64}, {8, 96}, {8, UINT32_MAX}};
    load_good();
    qpk_file *f = NULL;
    char text[512] = "";
    uint8_t *rec = good + section_offset(good, QPK_SEC_TENSORS); /* 64 columns */
    put(good + QPK_H_REQUIRED, 8, QPK_FEATURE_ACTS);
    put(rec + QPK_T_ACT_SCHEME, 1, QPK_ACT_DYNAMIC_TOKEN);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        put(rec + QPK_T_ACT_BITS, 1, (uint64_t)bad[i].bits);
        put(rec + QPK_T_ACT_GROUP, 4, bad[i].group);
        repair(good, good_bytes);
        ck_assert_int_eq(qpk_open_memory(good, good_bytes, "F", &f, text, sizeof text), QPK_E_INPUT);
        ck_assert_msg(strstr(text, "expected 2 to 8 bits and a multiple of 32 below 64") != NULL, "%s", text);
    }
    put(rec + QPK_T_ACT_BITS, 1, 8);
    put(rec + QPK_T_ACT_GROUP, 4, 32);
    repair(good, good_bytes);
    ck_assert_int_eq(qpk_open_memory(good, good_bytes, "F", &f, text, sizeof text), QPK_OK);
    ck_assert_int_eq(qpk_tensor_at(f, 0)->act_bits, 8);
    ck_assert_int_eq(qpk_tensor_at(f, 0)->act_group, 32);
    qpk_close(f);
}
END_TEST

/* Two names made equal, and a control character: positions depend on the strings. */
START_TEST(bad_names)
{
    load_good();
    char text[512];
    qpk_file *f = NULL;
    uint8_t *tensors = good + section_offset(good, QPK_SEC_TENSORS);
    uint8_t saved[8];
    memcpy(saved, tensors + T, 8);
    memcpy(tensors + T, tensors, 8);
    repair(good, good_bytes);
    ck_assert_int_eq(qpk_open_memory(good, good_bytes, "F", &f, text, sizeof text), QPK_E_INPUT);
    ck_assert_str_eq(text, "F: tensor name 'model.embed_tokens.weight' occurs twice");
    memcpy(tensors + T, saved, 8);
    uint8_t *alias = good + section_offset(good, QPK_SEC_ALIASES);
    memcpy(alias, tensors, 8);
    repair(good, good_bytes);
    ck_assert_int_eq(qpk_open_memory(good, good_bytes, "F", &f, text, sizeof text), QPK_E_INPUT);
    ck_assert_str_eq(text, "F: tensor name 'model.embed_tokens.weight' occurs twice");
    uint32_t name_offset;
    memcpy(&name_offset, tensors, sizeof name_offset);
    good[section_offset(good, QPK_SEC_STRINGS) + name_offset] = '\n';
    repair(good, good_bytes);
    ck_assert_int_eq(qpk_open_memory(good, good_bytes, "F", &f, text, sizeof text), QPK_E_INPUT);
    ck_assert_msg(strstr(text, "control character in its name") != NULL, "%s", text);
}
END_TEST

START_TEST(truncated)
{
    load_good();
    char *path = temp_name("cut.qpk");
    qc_err err = {0};
    size_t lengths[64], n = 0;
    for (int s = 0; s < QPK_N_SECTIONS; s++) {
        uint64_t size, offset = section_offset(good, s);
        memcpy(&size, good + SEC(s, QPK_S_BYTES), 8);
        lengths[n++] = offset;
        lengths[n++] = offset + 1;
        lengths[n++] = offset + size - (size > 0);
    }
    for (size_t i = 0; i < 4; i++)
        lengths[n++] = (size_t[]){0, 7, QPK_HEADER_BYTES - 1, QPK_HEADER_BYTES}[i];
    for (size_t i = 0; i < n; i++) {
        qc_source *src = NULL;
        qpk_file *f = NULL;
        if (lengths[i] >= good_bytes)
            continue;
        uint8_t *exact = malloc(lengths[i] + 1); /* so that a sanitizer sees any read behind the end */
        memcpy(exact, good, lengths[i]);
        ck_assert_int_eq(qpk_open_memory(exact, lengths[i], "F", &f, NULL, 0), QPK_E_INPUT);
        free(exact);
        ck_assert_int_eq(qc_file_write(path, true, good, lengths[i], &err), QC_OK);
        ck_assert_int_eq(qc_qpk_open(path, &src, &err), QC_E_INPUT);
        ck_assert_msg(strstr(err.msg, "too short") || strstr(err.msg, "(cut short?)"), "%zu: %s", lengths[i],
                      err.msg);
    }
    unlink(path);
    free(path);
}
END_TEST

/* Every byte of header and tables is covered by a checksum or is padding; every byte of data by the check. */
START_TEST(flipped)
{
    load_good();
    uint64_t tables = section_offset(good, QPK_SEC_STRINGS);
    qpk_file *f = NULL;
    char text[512];
    size_t n_seen = 0;
    for (size_t i = 0; i < good_bytes; i++) {
        good[i] ^= 0x10;
        int rc = qpk_open_memory(good, good_bytes, "F", &f, text, sizeof text);
        if (rc == QPK_OK) {
            rc = qpk_check(f, text, sizeof text);
            ck_assert_msg(rc == QPK_OK || strstr(text, "is damaged (checksum"), "%s", text);
            qpk_close(f);
            if (i < QPK_HEADER_BYTES)
                ck_abort_msg("byte %zu of the header is not checked", i);
        }
        good[i] ^= 0x10;
        n_seen += rc < 0;
        if (rc == QPK_OK) /* only padding may change unseen, and padding is zero */
            ck_assert_msg(good[i] == 0, "byte %zu", i);
    }
    ck_assert_uint_gt(n_seen, (good_bytes - tables) * 9 / 10);
}
END_TEST

START_TEST(bad_side_file)
{
    load_good();
    char text[512], out[4096];
    qpk_file *f = NULL;
    ck_assert_int_eq(qpk_open_memory(good, good_bytes, "F", &f, NULL, 0), QPK_OK);
    uint64_t at = qpk_file_at(f, 0)->offset, n = qpk_file_at(f, 0)->stored_bytes,
             raw = qpk_file_at(f, 0)->raw_bytes;
    ck_assert_int_eq(qpk_file_at(f, 0)->method, 1);
    qpk_close(f);
    uint8_t *rec = good + section_offset(good, QPK_SEC_FILES);
    for (int what = 0; what < 4; what++) {
        uint8_t *copy = malloc(good_bytes);
        memcpy(copy, good, good_bytes);
        uint8_t *r = copy + (rec - good);
        if (what == 0)
            copy[at + n / 2] ^= 0xff; /* rotten, checksum made right below */
        else if (what == 1)
            put(r + QPK_F_RAW_BYTES, 8, raw + 1); /* longer than what is in there */
        else if (what == 2)
            put(r + QPK_F_RAW_BYTES, 8, raw - 1); /* shorter */
        else
            put(r + QPK_F_STORED_BYTES, 8, n - 1); /* stream cut */
        uint64_t stored;
        memcpy(&stored, r + QPK_F_STORED_BYTES, 8);
        put(r + QPK_F_CRC, 4, crc32_z(0, copy + at, stored));
        repair(copy, good_bytes);
        ck_assert_int_eq(qpk_open_memory(copy, good_bytes, "F", &f, text, sizeof text), QPK_OK);
        ck_assert_int_eq(qpk_file_read(f, 0, out, text, sizeof text), QPK_E_INPUT);
        ck_assert_msg(strstr(text, "side file 'config.json' can not be inflated"), "%d: %s", what, text);
        ck_assert_int_eq(qpk_file_read(f, 2, out, text, sizeof text), QPK_E_USAGE);
        qpk_close(f);
        free(copy);
    }
}
END_TEST

START_TEST(not_files)
{
    char text[16];
    qpk_file *f = NULL;
    qc_source *src = NULL;
    qc_err err = {0};
    ck_assert_int_eq(qpk_open("/nonexistent/x.qpk", &f, text, sizeof text), QPK_E_INPUT);
    ck_assert_str_eq(text, "/nonexistent/x."); /* cut, terminated */
    ck_assert_int_eq(qpk_open("/tmp", &f, NULL, 0), QPK_E_INPUT);
    ck_assert_int_eq(qpk_open("/dev/null", &f, NULL, 0), QPK_E_INPUT);
    ck_assert_int_eq(qc_qpk_open("/nonexistent/x.qpk", &src, &err), QC_E_INPUT);
    ck_assert_str_eq(err.msg, "/nonexistent/x.qpk: No such file or directory");
    ck_assert(!qc_qpk_probe("/tmp"));
}
END_TEST

int main(void)
{
    return run_tests("qpk_bad", (test_case[]){{"bad fields", bad_fields},
                                              {"bad acts", bad_acts},
                                              {"bad names", bad_names},
                                              {"truncated", truncated},
                                              {"flipped", flipped},
                                              {"bad side file", bad_side_file},
                                              {"not files", not_files},
                                              {NULL, NULL}});
}
