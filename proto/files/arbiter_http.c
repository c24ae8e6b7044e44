/* See arbiter_http.h. */
#include "proto/files/arbiter_http.h"

#include <stdlib.h>
#include <string.h>

#include <curl/curl.h>

#include "proto/base/check.h"
#include "proto/base/library.h"
#include "proto/base/sys.h"

#define SHOWN_BYTES 100 /* of an answer that is an error */

/* -- libcurl ----------------------------------------------------------------------------------- */

/* X(member, symbol, result, arguments) */
#define CURL_FUNCTIONS(X)                                                               \
    X(global_init, "curl_global_init", CURLcode, (long flags))                          \
    X(easy_init, "curl_easy_init", CURL *, (void))                                      \
    X(easy_setopt, "curl_easy_setopt", CURLcode, (CURL * easy, CURLoption option, ...)) \
    X(easy_getinfo, "curl_easy_getinfo", CURLcode, (CURL * easy, CURLINFO info, ...))   \
    X(easy_perform, "curl_easy_perform", CURLcode, (CURL * easy))                       \
    X(easy_cleanup, "curl_easy_cleanup", void, (CURL * easy))                           \
    X(easy_strerror, "curl_easy_strerror", const char *, (CURLcode code))               \
    X(slist_append, "curl_slist_append", struct curl_slist *,                           \
      (struct curl_slist * list, const char *text))                                     \
    X(slist_free_all, "curl_slist_free_all", void, (struct curl_slist * list))

struct curl_table {
/* NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration */
#define CURL_MEMBER(member, symbol, result, arguments) result(*member) arguments;
    CURL_FUNCTIONS(CURL_MEMBER)
#undef CURL_MEMBER
};

static const struct library_function functions[] = {
#define CURL_SYMBOL(member, symbol, result, arguments) \
    { symbol, offsetof(struct curl_table, member) },
    CURL_FUNCTIONS(CURL_SYMBOL)
#undef CURL_SYMBOL
};

static struct curl_table curl;

static int start(struct shd_err *e)
{
    const CURLcode code = curl.global_init(CURL_GLOBAL_DEFAULT);
    return code == CURLE_OK
               ? SHD_OK
               : err_set(e, SHD_ENOTSUP, "start libcurl: %s", curl.easy_strerror(code));
}

static struct library library = {
    .names = { "libcurl.so.4", "libcurl-gnutls.so.4" },
    .absent = "an arbiter by HTTP needs libcurl: install libcurl4",
    .called = "libcurl.so.4",
    .remedy = "install libcurl 7.70 or newer",
    .functions = functions,
    .function_count = ARRAY_SIZE(functions),
    .table = &curl,
    .start = start,
    .lock = PTHREAD_MUTEX_INITIALIZER,
};

int arbiter_http_load(struct shd_err *e)
{
    return library_load(&library, e);
}

/* -- The answer -------------------------------------------------------------------------------- */

struct answer {
    char *text; /* owned, [bytes_max + 1] */
    size_t used, bytes_max;
    bool longer;
};

/* Called by libcurl with a piece of the body. Less than bytes ends the request. */
static size_t take_bytes(char *data, size_t one, size_t bytes, void *arg)
{
    struct answer *a = arg;
    CHECK(one == 1);
    a->longer = bytes > a->bytes_max - a->used;
    if (a->longer)
        return 0;
    memcpy(a->text + a->used, data, bytes);
    a->used += bytes;
    return bytes;
}

/* Of a server, on one line: what a terminal would take for its own is no text. */
static void clean(char *text)
{
    for (char *c = text; *c != '\0'; c++)
        if (*c < ' ' || *c == 127)
            *c = ' ';
}

static int refused(const struct arbiter_post *post, long status, struct answer *a,
                   struct shd_err *e)
{
    a->text[a->used < SHOWN_BYTES ? a->used : SHOWN_BYTES] = '\0';
    clean(a->text);
    return err_set(e, status == 401 || status == 403 ? SHD_EAUTH : SHD_EIO,
                   "%.80s answers with HTTP %ld: %s", post->url, status, a->text);
}

static int failed(const struct arbiter_post *post, CURLcode code, const struct answer *a,
                  struct shd_err *e)
{
    const char *why = curl.easy_strerror(code);
    switch (code) {
    case CURLE_WRITE_ERROR:
        if (a->longer)
            return err_set(e, SHD_ERANGE, "%.80s: the answer is longer than %zu bytes", post->url,
                           a->bytes_max);
        return err_set(e, SHD_EIO, "%.80s: %s", post->url, why);
    case CURLE_COULDNT_CONNECT:
        return err_set(e, SHD_EGONE, "nobody listens at %.80s", post->url);
    case CURLE_COULDNT_RESOLVE_HOST:
        return err_set(e, SHD_ENOENT, "%.80s: no such host", post->url);
    case CURLE_OPERATION_TIMEDOUT:
        return err_set(e, SHD_ETIMEDOUT, "%.80s has not answered for %.1f s", post->url,
                       (double)post->timeout_ms / 1000);
    case CURLE_OUT_OF_MEMORY:
        return err_set(e, SHD_ENOMEM, "no memory to ask %.80s", post->url);
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_WEIRD_SERVER_REPLY:
    case CURLE_GOT_NOTHING:
    case CURLE_PARTIAL_FILE:
        return err_set(e, SHD_EPROTO, "%.80s does not answer in HTTP: %s", post->url, why);
    default:
        return err_set(e, SHD_EIO, "%.80s: %s", post->url, why);
    }
}

/* -- The request ------------------------------------------------------------------------------- */

/* Its own connection, no proxy, no redirection, no signal. Without "Expect:" a server would be
 * waited for before the body goes. */
static bool prepare(CURL *easy, const struct arbiter_post *post, struct curl_slist *headers,
                    struct answer *a)
{
    return curl.easy_setopt(easy, CURLOPT_URL, post->url) == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_NOPROXY, "*") == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_FORBID_REUSE, 1L) == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_USERAGENT, "shardd") == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_HTTPHEADER, headers) == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_POSTFIELDS, post->body) == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_TIMEOUT_MS, post->timeout_ms) == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, post->connect_timeout_ms) ==
               CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_WRITEDATA, a) == CURLE_OK &&
           curl.easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_bytes) == CURLE_OK;
}

static int perform(CURL *easy, const struct arbiter_post *post, struct answer *a, bool *ret_sent,
                   struct shd_err *e)
{
    long status = 0;
    curl_off_t connected_us = 0;
    const CURLcode code = curl.easy_perform(easy);
    curl.easy_getinfo(easy, CURLINFO_CONNECT_TIME_T, &connected_us);
    curl.easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    *ret_sent = connected_us > 0;
    a->text[a->used] = '\0';
    if (code != CURLE_OK)
        return failed(post, code, a, e);
    return status == 200 ? SHD_OK : refused(post, status, a, e);
}

int arbiter_http_post(const struct arbiter_post *post, char **ret_answer, size_t *ret_bytes,
                      bool *ret_sent, struct shd_err *e)
{
    struct answer a = { .bytes_max = post->answer_bytes_max };
    struct curl_slist *headers = NULL, *longer = NULL;
    *ret_sent = false;
    int r = arbiter_http_load(e);
    if (r != SHD_OK)
        return r;
    CURL *easy = curl.easy_init();
    headers = curl.slist_append(NULL, "Content-Type: application/json");
    longer = headers != NULL ? curl.slist_append(headers, "Expect:") : NULL;
    a.text = sys_malloc(a.bytes_max + 1);
    if (easy != NULL && longer != NULL && a.text != NULL && prepare(easy, post, longer, &a))
        r = perform(easy, post, &a, ret_sent, e);
    else
        r = err_set(e, SHD_ENOMEM, "no memory to ask %.80s", post->url);
    curl.slist_free_all(headers);
    if (easy != NULL)
        curl.easy_cleanup(easy);
    if (r == SHD_OK) {
        *ret_answer = a.text;
        *ret_bytes = a.used;
    } else {
        free(a.text);
    }
    return r;
}
