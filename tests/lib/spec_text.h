/* Specs as text, for the tests of proto/spec/spec.h. */
#ifndef SHD_SPEC_TEXT_H
#define SHD_SPEC_TEXT_H

#include <stdarg.h>

#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/test.h"

/* The example of client/shd.h. */
__attribute__((unused)) static const char example[] =
    "{ \"name\": \"gpt\", \"seed\": 1, \"micro_batches\": 4, \"publish\": \"f32\","
    "  \"optimizer\": { \"kind\": \"adamw\", \"beta1\": 0.9, \"beta2\": 0.95, \"eps\": 1e-8 },"
    "  \"groups\": [ { \"name\": \"decay\", \"weight_decay\": 0.1 }, { \"name\": \"plain\" } ],"
    "  \"units\": ["
    "    { \"name\": \"embed\", \"tensors\": ["
    "      { \"name\": \"wte\", \"shape\": [256, 128], \"group\": \"decay\","
    "        \"init\": [\"normal\", 0, 0.02] } ] },"
    "    { \"name\": \"head\", \"uses\": [\"embed\"], \"tensors\": ["
    "      { \"name\": \"ln_f.weight\", \"shape\": [128], \"group\": \"plain\","
    "        \"init\": [\"const\", 1] } ] } ] }";

static struct spec *parse(const char *json)
{
    struct shd_err e;
    struct spec *spec = NULL;
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

/* Single quotes become double ones: JSON in C source stays readable. */
__attribute__((format(printf, 1, 2))) static char *quoted(const char *fmt, ...)
{
    static char text[20000];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (char *p = text; *p != 0; p++)
        if (*p == '\'')
            *p = '"';
    return text;
}

#define HEAD "'name':'m','micro_batches':1,'optimizer':{'kind':'sgd'}"

#define SMALL_UNITS "'units':[{'name':'u','tensors':[{'name':'t','shape':[3]}]}]"

#endif
