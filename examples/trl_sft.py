"""TRL: fine-tune a tiny Llama on sums with SFTTrainer in curved weight space, and load it as an ordinary model.

    python examples/trl_sft.py --out runs/sft
    python examples/trl_sft.py --out runs/sft --steps 300 --resume

What differs from a script for AdamW: `max_grad_norm=0.0` and `optimizer_cls_and_kwargs`. hf_trainer.py has what learned
scales need. Replace the model, the tokenizer and the data by your own.
"""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import symexplin as sel


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single characters."""
    words = ["<pad>", "<unk>", "<eos>", *"0123456789+= "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def tiny_model(vocabulary: int) -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens))


def main() -> None:
    """Train, save and ask for a sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output folder")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(10) for b in range(10)]
    args = SFTConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=20,
        learning_rate=3e-3,
        weight_decay=0.01,
        max_grad_norm=0.0,  # the optimizer clips, not the trainer
        lr_scheduler_type="cosine",
        logging_steps=10,
        save_steps=50,
        report_to="none",
        disable_tqdm=True,
        bf16=False,
        use_cpu=options.cpu,
    )
    rates = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "no_decay": "vectors"}
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=Dataset.from_list(sums),
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(lambda: sel.SELAdamW, {**rates, "max_grad_norm": 1.0}),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(options.out)
    question = tokenizer("3+4=", return_tensors="pt")
    answer = loaded.generate(**question, max_new_tokens=2, do_sample=False)
    print("answer:", tokenizer.decode(answer[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
