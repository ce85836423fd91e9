/* Chat messages to text: every template of tests/data/chat against Jinja (scripts/make_chat_vectors.py);
 * templates and messages that must be refused. */
#include "chat.h"
#include "qc_alloc.h"
#include "qc_test.h"

static qc_chat *chat_of(const char *template_text)
{
    qc_err err = {0};
    qc_chat *chat = NULL;
    ck_assert_msg(qc_chat_new(template_text, "<s>", "</s>", "t", &chat, &err) == QC_OK, "%s", err.msg);
    return chat;
}

static void check_text(const qc_chat *chat, const char *name, int number, const cJSON *messages,
                       const cJSON *want)
{
    qc_buf buf = {0};
    qc_err err = {0};
    int rc = qc_chat_render(chat, messages, name, &buf, &err);
    if (cJSON_IsNull(want)) { /* the template raises an exception */
        ck_assert_msg(rc == QC_E_UNSUPPORTED, "%s, conversation %d: rendered as %s", name, number, buf.data);
        ck_assert(strstr(err.msg, name));
    } else {
        ck_assert_msg(rc == QC_OK, "%s, conversation %d: %s", name, number, err.msg);
        ck_assert_msg(strcmp(buf.data, want->valuestring) == 0, "%s, conversation %d: %s\nJinja: %s", name,
                      number, buf.data, want->valuestring);
    }
    qc_buf_clear(&buf);
}

START_TEST(against_jinja)
{
    qc_err err = {0};
    cJSON *doc;
    ck_assert_int_eq(qc_json_load(test_data("chat/golden.json"), 1 << 20, true, &doc, &err), QC_OK);
    const cJSON *entry, *messages, *templates = qc_json_get(doc, "templates");
    ck_assert_int_ge(cJSON_GetArraySize(templates), 15);
    cJSON_ArrayForEach(entry, templates)
    {
        qc_chat *chat = NULL;
        ck_assert_msg(
            qc_chat_new(qc_json_get(entry, "template")->valuestring, qc_json_get(entry, "bos")->valuestring,
                        qc_json_get(entry, "eos")->valuestring, entry->string, &chat, &err) == QC_OK,
            "%s", err.msg);
        int i = 0;
        cJSON_ArrayForEach(messages, qc_json_get(doc, "conversations"))
        {
            check_text(chat, entry->string, i, messages, cJSON_GetArrayItem(qc_json_get(entry, "texts"), i));
            i++;
        }
        ck_assert_int_ge(i, 12);
        qc_chat_free(chat);
    }
    cJSON_Delete(doc);
}
END_TEST

/* Templates that look like known ones but say something else. */
START_TEST(unknown_templates)
{
    static const char *const bad[] = {
        "",
        "{{ messages }}",
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{% endif %}",
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] | "
        "trim) + "
        "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{% endif %}",
        "{{ bos_token + '[INST] <<SYS>>' + s + '<</SYS>> ' + m + ' [/INST]' + eos_token }}{{ "
        "raise_exception('') }}",
        "{{ '[SYSTEM_PROMPT]' + s + '[/SYSTEM_PROMPT]' + bos_token + eos_token }}{{ \"[INST]\" + m + "
        "\"[/INST]\" }}",
        "{{ '<start_of_turn>user' + m + '<end_of_turn>' }}",
        "{{ '<|user|>' + m + '<|end|><|tool|>' }}{% if add_generation_prompt %}{% endif %}",
        "{{ '<|start_header_id|>' + message['role'] + message['content'] + '<|eot_id|>' }}",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        qc_err err = {0};
        qc_chat *chat = NULL;
        ck_assert_msg(qc_chat_new(bad[i], "", "", "some/model", &chat, &err) == QC_E_UNSUPPORTED,
                      "template %zu", i);
        ck_assert(strstr(err.msg, "some/model") && strstr(err.msg, "not known"));
    }
}
END_TEST

static void expect(const qc_chat *chat, const char *json, int code, const char *fragment)
{
    qc_err err = {0};
    qc_buf buf = {0};
    cJSON *messages = cJSON_Parse(json);
    ck_assert_int_eq(qc_chat_render(chat, messages, "line 7", &buf, &err), code);
    ck_assert_msg(strstr(err.msg, fragment) && strstr(err.msg, "line 7"), "%s", err.msg);
    cJSON_Delete(messages);
    qc_buf_clear(&buf);
}

START_TEST(bad_messages)
{
    qc_chat *chat = chat_of(
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{% endif %}");
    ck_assert_str_eq(qc_chat_name(chat), "ChatML");
    expect(chat, "[]", QC_E_INPUT, "not a list");
    expect(chat, "\"text\"", QC_E_INPUT, "not a list");
    expect(chat, "[3]", QC_E_INPUT, "message 0");
    expect(chat, "[{\"content\": \"x\"}]", QC_E_INPUT, "role");
    expect(chat, "[{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"tool\", \"content\": \"x\"}]",
           QC_E_UNSUPPORTED, "message 1");
    expect(chat, "[{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"x\"}]}]",
           QC_E_UNSUPPORTED, "content");
    expect(chat, "[{\"role\": \"assistant\", \"content\": \"x\", \"tool_calls\": []}]", QC_E_UNSUPPORTED,
           "plain messages");
    expect(chat, "[{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"system\", \"content\": \"x\"}]",
           QC_E_UNSUPPORTED, "not the first");
    expect(chat, "[{\"role\": \"system\", \"content\": \"x\"}]", QC_E_UNSUPPORTED, "alone");
    qc_chat_free(chat);
}
END_TEST

int main(void)
{
    const test_case cases[] = {{"against_jinja", against_jinja},
                               {"unknown_templates", unknown_templates},
                               {"bad_messages", bad_messages},
                               {NULL, NULL}};
    return run_tests("chat", cases);
}
