/* Result lists: equal events are counted, strings are copied, failures leave the list whole. */
#include "qc_alloc.h"
#include "qc_result.h"

#include "qc_test.h"

#include <math.h>

START_TEST(events_are_counted)
{
    qc_event_list list = {0};
    char subject[32];
    for (int i = 0; i < 200; i++) {
        snprintf(subject, sizeof subject, "layer %d", i % 50);
        ck_assert_int_eq(
            qc_event_add(&list, QC_EVENT_FALLBACK, "group_fallback", subject, 1, NULL, "%d to %d", 128, 64),
            QC_OK);
    }
    ck_assert_int_eq(qc_event_add(&list, QC_EVENT_NOTE, "stray_file", NULL, 3, NULL, "ignored"), QC_OK);
    ck_assert_int_eq(list.n_events, 51);
    ck_assert_str_eq(list.events[7].subject, "layer 7");
    ck_assert_str_eq(list.events[7].detail, "128 to 64");
    ck_assert_int_eq(list.events[7].count, 4);
    ck_assert_str_eq(list.events[50].subject, "");
    ck_assert_int_eq(qc_event_count(&list, NULL), 200);
    ck_assert_int_eq(qc_event_count(&list, "stray_file"), 3);
    ck_assert_int_eq(qc_event_count(&list, "absent"), 0);
    qc_event_list_clear(&list);
    ck_assert_int_eq(qc_event_count(&list, NULL), 0);
    qc_event_list_clear(NULL);
}
END_TEST

START_TEST(account_sums)
{
    qc_account_list list = {0};
    char name[] = "w0";
    uint64_t in, out;
    for (int i = 0; i < 40; i++) {
        qc_tensor_account t = {.name = name, .bytes_in = 10, .bytes_out = 3};
        name[1] = (char)('0' + i % 10);
        ck_assert_int_eq(qc_account_add(&list, &t, NULL), QC_OK);
    }
    ck_assert_str_eq(list.tensors[13].name, "w3");
    ck_assert_str_eq(list.tensors[13].rule, "");
    qc_account_bytes(&list, &in, &out);
    ck_assert(in == 400 && out == 120);
    qc_account_list_clear(&list);
    qc_account_list_clear(NULL);
    ck_assert_str_eq(qc_action_name(QC_ACTION_KEPT16), "kept16");
}
END_TEST

START_TEST(out_of_memory)
{
    for (long nth = 1; nth <= 4; nth++) {
        qc_event_list list = {0};
        qc_account_list account = {0};
        qc_tensor_account t = {.name = (char[]){"w"}};
        qc_alloc_fail_at(nth);
        ck_assert_int_eq(qc_event_add(&list, QC_EVENT_NOTE, "k", "s", 1, NULL, "d"), QC_E_RESOURCE);
        qc_alloc_fail_at(nth);
        if (nth <= 3)
            ck_assert_int_eq(qc_account_add(&account, &t, NULL), QC_E_RESOURCE);
        qc_alloc_fail_at(0);
        ck_assert_int_eq(list.n_events + account.n_tensors, 0);
        qc_event_list_clear(&list);
        qc_account_list_clear(&account);
    }
}
END_TEST

START_TEST(evaluation_starts_unmeasured)
{
    qc_evaluation eval;
    qc_evaluation_init(&eval);
    ck_assert(isnan(eval.ppl) && isnan(eval.top1) && isnan(eval.kld_max) && eval.windows == 0 &&
              !eval.protocol);
    eval.protocol = qc_strdup("gptq");
    eval.per_window = qc_calloc(3, sizeof *eval.per_window);
    qc_evaluation_clear(&eval);
    ck_assert(!eval.protocol && !eval.per_window);
    qc_evaluation_clear(NULL);
}
END_TEST

int main(void)
{
    const test_case cases[] = {
        {"events_are_counted", events_are_counted},
        {"account_sums", account_sums},
        {"out_of_memory", out_of_memory},
        {"evaluation_starts_unmeasured", evaluation_starts_unmeasured},
        {0},
    };
    return run_tests("result", cases);
}
