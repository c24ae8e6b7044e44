/* Specs as text, for the tests of proto/spec/spec.h. */
#ifndef SHD_SPEC_TEXT_H
#define SHD_SPEC_TEXT_H

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

struct spec *parse(const char *json);

/* Single quotes become double ones: JSON in C source stays readable. */
__attribute__((format(printf, 1, 2))) char *quoted(const char *fmt, ...);

#define HEAD        "'name':'m','micro_batches':1,'optimizer':{'kind':'sgd'}"
#define SMALL_UNITS "'units':[{'name':'u','tensors':[{'name':'t','shape':[3]}]}]"

#endif
