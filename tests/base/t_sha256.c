/* The examples of FIPS 180-4 (NIST's example file), whole, in pieces and from a file. */
#include "qc_file.h"
#include "qc_sha256.h"

#include "qc_test.h"

#include <sys/stat.h>
#include <unistd.h>

static const char two_blocks[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";

START_TEST(fips_vectors)
{
    char hex[QC_SHA256_HEX_BYTES];
    ck_assert_int_eq(qc_sha256_buffer("abc", 3, hex, NULL), QC_OK);
    ck_assert_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    ck_assert_int_eq(qc_sha256_buffer("", 0, hex, NULL), QC_OK);
    ck_assert_str_eq(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    ck_assert_int_eq(qc_sha256_buffer(two_blocks, strlen(two_blocks), hex, NULL), QC_OK);
    ck_assert_str_eq(hex, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}
END_TEST

START_TEST(a_million_a_in_pieces_and_from_a_file)
{
    const char *want = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
    static char block[1000];
    memset(block, 'a', sizeof block);
    char hex[QC_SHA256_HEX_BYTES], path[] = "/tmp/qc-sha-XXXXXX";
    qc_sha256 *state = qc_sha256_new();
    int fd = mkstemp(path);
    for (int i = 0; i < 1000; i++) {
        qc_sha256_update(state, block, sizeof block);
        ck_assert_int_eq(write(fd, block, sizeof block), sizeof block);
    }
    close(fd);
    qc_sha256_final(state, hex);
    ck_assert_str_eq(hex, want);
    ck_assert_int_eq(qc_sha256_file(path, hex, NULL), QC_OK);
    ck_assert_str_eq(hex, want);
    unlink(path);
}
END_TEST

START_TEST(no_file_no_hash)
{
    qc_err err;
    char hex[QC_SHA256_HEX_BYTES] = "untouched", fifo[] = "/tmp/qc-sha-XXXXXX";
    ck_assert_int_eq(qc_sha256_file("/nonexistent/x", hex, &err), QC_E_INPUT);
    ck_assert_int_eq(qc_sha256_file("/tmp", hex, &err), QC_E_INPUT);
    ck_assert_ptr_nonnull(mkdtemp(fifo));
    char path[64];
    snprintf(path, sizeof path, "%s/f", fifo);
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    ck_assert_int_eq(qc_sha256_file(path, hex, &err), QC_E_INPUT); /* and does not wait for a writer */
    ck_assert_str_eq(hex, "untouched");
    unlink(path);
    rmdir(fifo);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"fips_vectors", fips_vectors},
        {"a_million_a_in_pieces_and_from_a_file", a_million_a_in_pieces_and_from_a_file},
        {"no_file_no_hash", no_file_no_hash},
        {0},
    };
    return run_tests("sha256", cases);
}
