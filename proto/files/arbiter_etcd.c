/* See arbiter_etcd.h. View N is the key's version N: etcd counts how often a key was written since
 * it was made, and a claim of view N is one transaction, "if its version is N - 1, write it". A key
 * whose version is not what its value says was written by somebody else, and is refused.
 *
 * A read is linearizable, etcd's default: a member that has lost the others does not answer it.
 * Of several members the next one is asked where the request cannot have been heard; a claim that
 * may have been is not made again, but is what the next read shows.
 *
 * API: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ */
#include "proto/files/arbiter_etcd.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>
#include <openssl/evp.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/files/arbiter_http.h"
#include "proto/files/arbiter_place.h"
#include "proto/files/arbiter_view.h"

#define URL_BYTES   256u /* of a member's, with NUL */
#define KEY_BYTES   256u /* with NUL */
#define ANSWER_MAX  (2 * (size_t)ARBITER_TEXT_MAX)
#define WAIT_MS     1800 /* a call's members all together, less than ARBITER_WAIT_MS */
#define MEMBER_MS   100  /* with less left no other member is asked */
#define URL_CHARS   "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:[]"
#define KEY_CHARS   "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./"
#define BASE64(n)   (((n) + 2) / 3 * 4 + 1) /* bytes of n in it, with NUL */
#define DECIMAL_MAX 24u

struct place {
    char urls[ARBITER_ETCD_URLS_MAX][URL_BYTES]; /* "http://a:2379" */
    uint32_t url_count;
    uint32_t first; /* asked first: the last one that answered */
    char cluster[ARBITER_NAME_BYTES];
    char key[KEY_BYTES + ARBITER_NAME_BYTES]; /* "PREFIX/CLUSTER" */
    char key64[BASE64(KEY_BYTES + ARBITER_NAME_BYTES)];
};

/* -- Asking ------------------------------------------------------------------------------------ */

/* One member; *ret_sent as arbiter_http_post() has it. */
static int ask_one(const struct place *p, const char *url, const char *path, const char *body,
                   long wait_ms, json_t **ret_answer, bool *ret_sent, struct shd_err *e)
{
    char whole[URL_BYTES + 32], *text = NULL;
    size_t bytes = 0;
    json_error_t why;
    snprintf(whole, sizeof whole, "%s%s", url, path);
    const struct arbiter_post post = {
        .url = whole,
        .body = body,
        .answer_bytes_max = ANSWER_MAX,
        .timeout_ms = wait_ms,
        .connect_timeout_ms = wait_ms / (p->url_count > 1 ? 2 : 1), /* time for another one */
    };
    const int r = arbiter_http_post(&post, &text, &bytes, ret_sent, e);
    if (r != SHD_OK)
        return r;
    *ret_answer = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (json_is_object(*ret_answer))
        return SHD_OK;
    json_decref(*ret_answer);
    return err_set(e, SHD_EPROTO, "%.80s does not answer as etcd does: no JSON object", whole);
}

static int ask(struct place *p, const char *path, json_t *request, json_t **ret_answer,
               struct shd_err *e)
{
    const uint64_t until_ns = clock_now_ns() + WAIT_MS * NS_PER_MS;
    char *body = request != NULL ? json_dumps(request, JSON_COMPACT) : NULL;
    int r = body != NULL ? SHD_EGONE : err_set(e, SHD_ENOMEM, "no memory to ask etcd");
    json_decref(request);
    for (uint32_t i = 0; body != NULL && i < p->url_count; i++) {
        const uint64_t now_ns = clock_now_ns();
        bool sent = false;
        if (i > 0 && now_ns + MEMBER_MS * NS_PER_MS > until_ns)
            break;
        const long left_ms = (long)((until_ns - now_ns) / NS_PER_MS);
        r = ask_one(p, p->urls[p->first], path, body, left_ms > 0 ? left_ms : 1, ret_answer, &sent,
                    e);
        if (r == SHD_OK)
            break;
        p->first = (p->first + 1) % p->url_count;
        if (sent)
            break;
    }
    free(body);
    return r;
}

/* -- What it answers --------------------------------------------------------------------------- */

/* 64-bit numbers are strings in the gateway's JSON. */
static bool take_number(const json_t *value, uint64_t *ret_number)
{
    const char *text = json_string_value(value);
    char *end = NULL;
    if (text == NULL || text[0] < '0' || text[0] > '9' || strlen(text) >= DECIMAL_MAX)
        return false;
    *ret_number = strtoull(text, &end, 10);
    return *end == '\0' && *ret_number <= ARBITER_NUMBER_MAX;
}

/* The bytes of a text in base64; the caller's to free. */
static unsigned char *decode(const char *text, size_t *ret_bytes)
{
    const size_t length = strlen(text);
    if (length == 0 || length % 4 != 0 || length > BASE64(ARBITER_TEXT_MAX))
        return NULL;
    unsigned char *bytes = sys_malloc(length / 4 * 3 + 1);
    const int n = bytes != NULL ? EVP_DecodeBlock(bytes, (const unsigned char *)text, (int)length)
                                : -1;
    const size_t padding = (size_t)(text[length - 1] == '=') + (size_t)(text[length - 2] == '=');
    if (n < (int)padding) {
        free(bytes);
        return NULL;
    }
    *ret_bytes = (size_t)n - padding;
    return bytes;
}

static int take_view(const struct place *p, const char *value, uint64_t version,
                     struct arbiter_view *ret_view, struct shd_err *e)
{
    struct arbiter_view view = { 0 };
    size_t bytes = 0;
    unsigned char *text = decode(value, &bytes);
    int r = text != NULL ? arbiter_view_parse((const char *)text, bytes, p->cluster, &view, e)
                         : err_set(e, SHD_EINVAL, "no text of a view");
    free(text);
    if (r != SHD_OK)
        return err_prefix(e, "etcd's key '%s' has no view", p->key);
    if (view.number != version) {
        r = err_set(e, SHD_EINVAL,
                    "etcd's key '%s' has version %" PRIu64 " and says that it is view %" PRIu64
                    ": somebody else has written it",
                    p->key, version, view.number);
        arbiter_view_free(&view);
        return r;
    }
    *ret_view = view;
    return SHD_OK;
}

/* Of a range's answer: version 0: there is no such key, and *ret_value is NULL. */
static int take_range(const struct place *p, const json_t *range, uint64_t *ret_version,
                      const char **ret_value, struct shd_err *e)
{
    const json_t *kvs = json_object_get(range, "kvs");
    const json_t *kv = json_array_get(kvs, 0);
    *ret_version = 0;
    *ret_value = NULL;
    if (json_is_object(range) && kvs == NULL)
        return SHD_OK;
    *ret_value = json_string_value(json_object_get(kv, "value"));
    if (json_array_size(kvs) != 1 || *ret_value == NULL ||
        !take_number(json_object_get(kv, "version"), ret_version) || *ret_version == 0)
        return err_set(e, SHD_EPROTO, "etcd says of key '%s' no one version and value", p->key);
    return SHD_OK;
}

static int place_read(void *place, struct arbiter_view *ret_view, struct shd_err *e)
{
    struct place *p = place;
    json_t *answer = NULL;
    const char *value = NULL;
    uint64_t version = 0;
    int r = ask(p, "/v3/kv/range", json_pack("{s:s}", "key", p->key64), &answer, e);
    if (r != SHD_OK)
        return r;
    if (json_object_get(answer, "header") == NULL)
        r = err_set(e, SHD_EPROTO, "%.80s does not answer as etcd does: no header",
                    p->urls[p->first]);
    if (r == SHD_OK)
        r = take_range(p, answer, &version, &value, e);
    if (r == SHD_OK && version == 0)
        *ret_view = (struct arbiter_view){ 0 };
    else if (r == SHD_OK)
        r = take_view(p, value, version, ret_view, e);
    json_decref(answer);
    return r;
}

/* -- Claiming ---------------------------------------------------------------------------------- */

static json_t *transaction(const struct place *p, const char *value64, uint64_t number)
{
    char version[DECIMAL_MAX];
    snprintf(version, sizeof version, "%" PRIu64, number - 1);
    return json_pack("{s:[{s:s, s:s, s:s, s:s}], s:[{s:{s:s, s:s}}], s:[{s:{s:s}}]}", "compare",
                     "key", p->key64, "target", "VERSION", "result", "EQUAL", "version", version,
                     "success", "requestPut", "key", p->key64, "value", value64, "failure",
                     "requestRange", "key", p->key64);
}

/* The transaction wrote nothing: is another's view there, or not the one before it? */
static int lost(const struct place *p, const json_t *answer, uint64_t number, struct shd_err *e)
{
    const json_t *first = json_array_get(json_object_get(answer, "responses"), 0);
    const char *value;
    uint64_t version = 0;
    const int r = take_range(p, json_object_get(first, "response_range"), &version, &value, e);
    if (r != SHD_OK)
        return r;
    if (version >= number)
        return err_set(e, SHD_EBUSY, "view %" PRIu64 " is another's: the newest is %" PRIu64,
                       number, version);
    return err_set(e, SHD_EINVAL,
                   "view %" PRIu64 " cannot follow view %" PRIu64 ", the newest of key '%s'",
                   number, version, p->key);
}

static int place_claim(void *place, const struct arbiter_view *next, struct shd_err *e)
{
    struct place *p = place;
    json_t *answer = NULL;
    char *text = NULL;
    int r = arbiter_view_write(next, p->cluster, &text, e);
    if (r != SHD_OK)
        return r;
    const size_t bytes = strlen(text);
    char *value64 = sys_malloc(BASE64(bytes));
    if (value64 != NULL) {
        EVP_EncodeBlock((unsigned char *)value64, (const unsigned char *)text, (int)bytes);
        r = ask(p, "/v3/kv/txn", transaction(p, value64, next->number), &answer, e);
    } else {
        r = err_set(e, SHD_ENOMEM, "no memory for a view");
    }
    free(value64);
    free(text);
    if (r != SHD_OK)
        return r;
    if (!json_is_true(json_object_get(answer, "succeeded"))) /* false is left out */
        r = lost(p, answer, next->number, e);
    json_decref(answer);
    return r;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static int wrong(const char *where, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL,
                   "arbiter etcd:%.100s is not etcd:http://HOST:PORT/PREFIX, with letters, digits, "
                   "'-', '_', '.' and '/' in PREFIX",
                   where);
}

/* "http://a:2379" and what is behind it; 0: it is none. */
static size_t url_bytes(const char *text)
{
    static const char *const schemes[] = { "http://", "https://" };
    for (size_t i = 0; i < ARRAY_SIZE(schemes); i++) {
        const size_t scheme = strlen(schemes[i]);
        if (strncmp(text, schemes[i], scheme) != 0)
            continue;
        const size_t host = strspn(text + scheme, URL_CHARS);
        return host > 0 ? scheme + host : 0;
    }
    return 0;
}

static int parse(const char *where, struct place *p, struct shd_err *e)
{
    const char *at = where;
    for (;; at++) {
        const size_t bytes = url_bytes(at);
        if (bytes == 0)
            return wrong(where, e);
        if (bytes >= URL_BYTES || p->url_count == ARBITER_ETCD_URLS_MAX)
            return err_set(e, SHD_ERANGE, "arbiter etcd:%.60s...: at most %u addresses of %u bytes",
                           where, ARBITER_ETCD_URLS_MAX, URL_BYTES - 1);
        snprintf(p->urls[p->url_count++], URL_BYTES, "%.*s", (int)bytes, at);
        at += bytes;
        if (*at != ',')
            break;
    }
    const size_t bytes = *at == '/' ? strlen(at + 1) : 0;
    if (bytes == 0 || at[1 + strspn(at + 1, KEY_CHARS)] != '\0')
        return wrong(where, e);
    if (bytes >= KEY_BYTES)
        return err_set(e, SHD_ERANGE, "arbiter etcd:%.60s...: a prefix of %zu bytes, at most %u",
                       where, bytes, KEY_BYTES - 1);
    snprintf(p->key, sizeof p->key, "%s/%s", at + 1, p->cluster);
    EVP_EncodeBlock((unsigned char *)p->key64, (const unsigned char *)p->key, (int)strlen(p->key));
    return SHD_OK;
}

static const struct arbiter_ops etcd_ops = {
    .read = place_read,
    .claim = place_claim,
    .close = free,
};

int arbiter_etcd_open(const char *where, const char *cluster, struct arbiter_place *ret_place,
                      struct shd_err *e)
{
    struct place *p = sys_calloc(1, sizeof *p);
    if (p == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an arbiter");
    snprintf(p->cluster, sizeof p->cluster, "%s", cluster);
    int r = parse(where, p, e);
    if (r == SHD_OK)
        r = arbiter_http_load(e);
    if (r == SHD_OK)
        *ret_place = (struct arbiter_place){ &etcd_ops, p };
    else
        free(p);
    return r;
}
